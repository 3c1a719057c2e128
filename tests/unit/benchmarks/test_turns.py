"""Two sides take turns, fairly, and a comparison of unequal work is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.turns import Side, Turns, Work, take_turns

WORK = Work(samples=1, prompt_tokens=2, completion_tokens=3)


def notes_its_turns(turns: Turns, settings: Mapping[str, Any]) -> None:
    while True:
        turns.begin()
        with Path(settings["log"]).open("a") as log:
            log.write(settings["name"])
        turns.end(settings.get("work", WORK), cores=len(os.sched_getaffinity(0)))


def fails(turns: Turns, settings: Mapping[str, Any]) -> None:
    raise ValueError("the model file is gone")


def hangs(turns: Turns, settings: Mapping[str, Any]) -> None:
    time.sleep(60)


def test_the_order_alternates_and_both_run_on_one_core(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    sides = {name: (notes_its_turns, {"log": log, "name": name}) for name in "ab"}

    results = take_turns(sides, rounds=3, deadline_s=60)

    # Unmeasured a b, then the rounds b a, a b, b a.
    assert (tmp_path / "log").read_text() == "ab" + "ba" + "ab" + "ba"
    assert [len(result.turns) for result in results.values()] == [3, 3]
    assert {turn.notes["cores"] for result in results.values() for turn in result.turns} == {1}
    assert all(result.peak_rss_bytes > 1_000_000 for result in results.values())


def test_unequal_work_is_refused(tmp_path: Path) -> None:
    log, other = str(tmp_path / "log"), Work(samples=1, prompt_tokens=2, completion_tokens=4)
    sides: dict[str, tuple[Side, dict[str, Any]]] = {
        "ours": (notes_its_turns, {"log": log, "name": "a"}),
        "theirs": (notes_its_turns, {"log": log, "name": "b", "work": other}),
    }

    with pytest.raises(RuntimeError, match="different work"):
        take_turns(sides, rounds=1, deadline_s=60, warm_up=False)


def test_a_failing_side_reports_its_error() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)theirs: .*the model file is gone"):
        take_turns({"theirs": (fails, {})}, rounds=1, deadline_s=60)


def test_a_silent_side_is_given_up() -> None:
    with pytest.raises(RuntimeError, match="theirs: silent for 1 s"):
        take_turns({"theirs": (hangs, {})}, rounds=1, deadline_s=1)
