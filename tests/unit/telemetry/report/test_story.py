from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.report.run_data import outcome_of, read_run
from tidemill.telemetry.run_dir import RunDirectory

GONE = 2**22 + 12345  # beyond the largest process id of Linux


def start(pid: int = 0, host: str = "") -> dict[str, Any]:
    return {"event": "session_start", "pid": pid or os.getpid(), "host": host or platform.node()}


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([], "unknown"),
        ([{"event": "rollout"}], "unknown"),
        ([start()], "running"),
        ([start(pid=1)], "running"),
        ([start(pid=GONE)], "killed"),
        ([start(host="elsewhere")], "unknown"),
        ([start(), {"event": "session_end", "outcome": "finished"}], "finished"),
        ([{"event": "session_end", "outcome": "finished"}, start(pid=GONE)], "killed"),
    ],
)
def test_how_a_run_ended(events: list[dict[str, Any]], outcome: str) -> None:
    assert outcome_of(events) == outcome


def test_the_first_and_the_last_steps_make_the_windows(tmp_path: Path) -> None:
    story = read_run(FabricatedRun(tmp_path).make())
    assert story.first.steps == (1, 2, 3) and story.last.steps == (18, 19, 20)
    assert story.evaluated_first.steps == (0,) and story.evaluated_last.steps == (20,)
    assert len(story.first.samples) == 3 * 64
    assert (story.outcome, story.name) == ("finished", "smollm2-addition")


@pytest.mark.parametrize(
    ("steps", "first", "last"), [(1, (1,), ()), (2, (1,), (2,)), (3, (1,), (3,)), (4, (1, 2), (3, 4))]
)
def test_windows_do_not_overlap(tmp_path: Path, steps: int, first: tuple[int, ...], last: tuple[int, ...]) -> None:
    run = RunDirectory(tmp_path)
    run.samples.mkdir()
    for step in range(1, steps + 1):
        (run.samples / f"step_{step:06d}.jsonl").write_text(f'{{"step":{step}}}\n')
    story = read_run(run)
    assert (story.first.steps, story.last.steps) == (first, last)


def test_nothing_at_all_is_a_story_too(tmp_path: Path) -> None:
    story = read_run(RunDirectory(tmp_path))
    assert (story.metrics, story.events, story.config_text, story.groups) == ((), (), "", 0)
