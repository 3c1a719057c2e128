"""The recipe of the comparison: its market, prices and prompts are those of their sources."""

from __future__ import annotations

import hashlib
import re

import pytest

from tidemill.config.load import RECIPES, load_spec
from tidemill.config.pool import TracePool
from tidemill.pool.build_provider import timetable_of
from tidemill.pool.traces import read_trace
from tidemill.recipes.data.counting import problems

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
    spec = load_spec(["@spot-market"])
    assert isinstance(spec.pool, TracePool)
    assert (spec.runtime, spec.pool.path, spec.pool.speed, spec.pool.max_workers) == ("ray", MARKET, 20.0, 1)
    assert spec.fleet.preemptible_usd_per_hour / spec.fleet.reserved_usd_per_hour == pytest.approx(0.3)
    # 43064 - 21529 = 21,535 s of the market in 1,077 s; the first machines come at once.
    changes = [*timetable_of(spec.pool)]
    assert changes[0].time_s == 0.0
    assert max(change.time_s for change in changes) == pytest.approx((28578 - 21529) / 20)  # 12 machines from then on


def test_the_prompts() -> None:
    rows = {row["prompt"].rpartition("\n")[2]: row["answer"] for row in problems()}
    assert rows["from 7 to 14:"] == "7 8 9 10 11 12 13 14"
    assert rows["from 20 to 11:"] == "20 19 18 17 16 15 14 13 12 11"
    assert "from 32 to 23:" not in rows  # shown as an example
    assert {len(answer.split()) for answer in rows.values()} == {8, 9, 10, 11, 12}
    (prompt,) = {row["prompt"].rpartition("\n")[0] for row in problems()}
    assert prompt == "from 3 to 9: 3 4 5 6 7 8 9\nfrom 32 to 23: 32 31 30 29 28 27 26 25 24 23"
