"""The recipe of the demo: its market and prices are those of their sources, its problems and demonstrations count."""

from __future__ import annotations

import hashlib
import re

import pytest

from tidemill.config.load import RECIPES
from tidemill.config.pipeline import PipelineSpec, load_recipe
from tidemill.config.pool import TracePool
from tidemill.pool.build_provider import timetable_of
from tidemill.pool.traces import read_trace
from tidemill.recipes.data.counting import demonstrations, problems

MARKET = RECIPES / "data" / "g4dn-us-east-1c.csv"
BAMBOO = "7b1cf45cb145f6a7c1f3c8d72488909ce3f125687d52684fecddfceddcba8c16"
"""SHA-256 of the lines of Bamboo's file from 21529,0 to 43064,12."""


def test_the_market_is_an_excerpt_of_the_recording() -> None:
    assert hashlib.sha256(MARKET.read_bytes()).hexdigest() == BAMBOO
    trace = read_trace(MARKET)
    assert (trace.start_s, trace.end_s, trace.peak) == (21529.0, 43064.0, 12)
    notice = (RECIPES / "data" / "README.md").read_text()
    assert MARKET.name in notice and "Copyright (c) 2022 UCLASystem" in re.sub(r"\s*\n> ?", " ", notice)


def test_the_recipe() -> None:
    recipe = load_recipe(["@spot-market"])
    assert isinstance(recipe, PipelineSpec)
    spec = recipe.stages[-1].spec
    assert isinstance(spec.pool, TracePool)
    assert (spec.runtime, spec.pool.path, spec.pool.speed, spec.pool.max_workers) == ("ray", MARKET, 20.0, 1)
    assert spec.fleet.preemptible_usd_per_hour / spec.fleet.reserved_usd_per_hour == pytest.approx(0.3)
    # 43064 - 21529 = 21,535 s of the market in 1,077 s; the first machines come at once.
    changes = [*timetable_of(spec.pool)]
    assert changes[0].time_s == 0.0
    assert max(change.time_s for change in changes) == pytest.approx((28578 - 21529) / 20)  # 12 machines from then on


def test_the_problems() -> None:
    answers = {row["prompt"]: row["answer"] for row in problems()}
    # 96: 14 numbers of 3 digits, 13 spaces; 1000: 28 numbers of 4 digits, 27 spaces
    assert (len(answers), min(map(len, answers.values())), max(map(len, answers.values()))) == (1599, 55, 139)
    assert answers["187:"] == "194 201 208 215 222 229 236 243 250 257 264 271 278 285 292 299"
    assert answers["195:"].split()[:2] == ["202", "209"]  # no number before the hundred
    assert (answers["200:"].split()[0], answers["200:"].split()[-1]) == ("207", "396")


def test_the_demonstrations() -> None:
    answers = {row["prompt"]: row["answer"] for row in problems()}
    taught = {row["prompt"]: row["answer"] for row in demonstrations()}
    assert [*taught] == [*answers]
    right = [taught[prompt] == answer for prompt, answer in answers.items()]
    # (1 - p)² for p from 0.25 to 0.75: 0.27 on average, 0.52 for the first tenth, 0.08 for the last
    assert sum(right) / len(right) == pytest.approx(0.27, abs=0.03)
    assert sum(right[:160]) / 160 == pytest.approx(0.52, abs=0.1)
    assert sum(right[-160:]) / 160 == pytest.approx(0.08, abs=0.06)
    longer = [prompt for prompt, answer in answers.items() if taught[prompt].startswith(f"{answer} ")]
    assert longer and all(int(taught[prompt].split()[-1]) - int(answers[prompt].split()[-1]) == 7 for prompt in longer)
    jumps = {
        int(after) - int(before)
        for answer in taught.values()
        for before, after in zip(answer.split(), answer.split()[1:], strict=False)
    }
    assert jumps == {7, 17}
