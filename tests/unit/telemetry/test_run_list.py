from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_fleet import FabricatedFleet
from tests.fabricated_run import FabricatedRun
from tidemill.telemetry import run_list
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_list import RunList, RunRow, find_runs, run_key
from tidemill.telemetry.run_reader import RunReader


def rows_of(folder: Path) -> dict[str, RunRow]:
    return {row.path.relative_to(folder).as_posix(): row for row in RunList(folder).refresh()}


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / f"{name}.{'toml' if name == 'config' else 'json' if name in JSON else 'jsonl'}").write_text(text)


JSON = ("manifest", "summary", "pipeline")


def test_a_row_has_the_figures_of_the_report(tmp_path: Path) -> None:
    run = FabricatedFleet(tmp_path / "a" / "fleet").make()
    data = RunData.load(run)
    (row,) = RunList(tmp_path).refresh()
    last = data.evaluations[-1]
    assert (row.name, row.state.name, row.problem) == (data.name, "finished", "")
    assert (row.step, row.total_steps) == (data.summary["steps"], data.total_steps)
    assert (row.figure, row.value, row.interval) == ("held-out accuracy", last.greedy_accuracy, last.accuracy_interval)
    assert row.cost_usd == data.summary["cost_usd"] > 0 and row.started == data.manifest["created"]
    assert row.sparkline == tuple(one.greedy_accuracy for one in data.evaluations)
    assert row.key == run_key(tmp_path, run.path) and len(row.key) == 16


def test_without_an_evaluation_the_reward_is_the_figure_and_a_long_sparkline_is_thinned(tmp_path: Path) -> None:
    lines = (f'{{"step":{step},"reward_mean":{step}}}\n' for step in range(1, 1001))
    write(tmp_path / "run", metrics="".join(lines), config="[trainer]\nsteps = 2000\n")
    row = rows_of(tmp_path)["run"]
    assert (row.figure, row.value, row.interval) == ("mean reward", 1000.0, None)
    assert len(row.sparkline) == 60 and (row.sparkline[0], row.sparkline[-1]) == (1.0, 1000.0)


def test_runs_are_found_once_and_not_inside_of_runs(tmp_path: Path) -> None:
    line = '{"step":1}\n'
    for name in ("b", "a10", "a2", "deep/1/2/3/4/x", "too/1/2/3/4/5/6/x", ".hidden", "²", "a2/nested"):
        write(tmp_path / name, metrics=line)
    write(tmp_path / "a2" / "abandoned" / "1", metrics=line)
    write(tmp_path / "just started" / "samples")
    write(tmp_path / "just started", config="")
    write(tmp_path / "samples" / "run", metrics=line)  # a folder of the user, not of a run
    (tmp_path / "again").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    write(tmp_path / "something else", config="")
    found = [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)]
    assert len(found) == 8 and set(found) - {"again", "b"} == {
        "a2", "a2/nested", "a10", "deep/1/2/3/4/x", "just started", "samples/run", "²",
    }  # fmt: skip
    assert found.index("a2") < found.index("a10") and len({"again", "b"} & set(found)) == 1
    assert find_runs(tmp_path / "a10") == [tmp_path / "a10"] and find_runs(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"metrics": '{"epoch": 1}\n{"loss": [1]}\n'}, "another program"),
        ({"events": "2026-11-27 server started\n"}, "another program"),
        ({"events": '{"event": ["a"]}\n', "metrics": "\x00\x01\n"}, "another program"),
        ({"manifest": '{"name": "extension", "version": 3}', "config": "[server]\nport = 1\n"}, "format 1"),
        ({"manifest": '{"run": "old", "sessions": []}', "metrics": '{"step":1}\n'}, "format 1"),
        ({"metrics": '{"step":1}\n', "config": "trainer = 3\n\x00", "summary": "[1]", "manifest": "{"}, ""),
        ({"events": '{"event":"session_start","session":{},"pid":"x"}\n{"event":"session_end","error":5}\n'}, ""),
        ({"events": '{"event":"session_start"}\n{"event":"plan","steps":[1]}\n{"event":"data","rows":7}\n'}, ""),
        ({"metrics": '{"step":1}\n{"step":' + "9" * 400 + '}\n{"step":2,"reward_mean":1e999}\n{"st'}, ""),
        ({"metrics": ""}, ""),
    ],
)
def test_files_that_are_torn_or_of_another_program_have_a_row(
    tmp_path: Path, files: dict[str, str], problem: str
) -> None:
    write(tmp_path / "odd", **files)
    FabricatedRun(tmp_path / "good", steps=2).make()
    rows = rows_of(tmp_path)
    assert problem in rows["odd"].problem and bool(problem) == bool(rows["odd"].problem)
    assert rows["odd"].state.name in ("unknown", "interrupted") and rows["good"].state.name == "finished"


def test_an_error_nobody_foresaw_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", metrics='{"step":1}\n')

    def fail(_: RunData) -> None:
        raise KeyError("figure")

    monkeypatch.setattr(run_list, "headline_figure", fail)
    assert rows_of(tmp_path)["run"].problem == "cannot be read: KeyError: 'figure'"


def test_a_folder_without_permission_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FabricatedRun(tmp_path / "good", steps=2).make()
    write(tmp_path / "closed", metrics='{"step":1}\n')
    scan, stat = os.scandir, Path.stat

    def refuse(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Any, *arguments: Any, **named: Any) -> Any:
            if "closed" in str(path) and not (call is stat and path.name == "closed"):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *arguments, **named)

        return wrapper

    monkeypatch.setattr("os.scandir", refuse(scan))
    monkeypatch.setattr(Path, "stat", refuse(stat))
    rows = rows_of(tmp_path)
    assert "Permission denied" in rows["closed"].problem and rows["good"].problem == ""


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FabricatedRun(tmp_path / "done", steps=2).make()
    going = FabricatedRun(tmp_path / "going", steps=4)
    recorder, runs, read = going.session(), RunList(tmp_path), list[str]()
    going.learn(recorder, 1)
    refresh = RunReader.refresh

    def noted(self: RunReader) -> frozenset[str]:
        changed = refresh(self)
        read.extend([self.path.name] if changed else [])
        return changed

    monkeypatch.setattr(RunReader, "refresh", noted)
    first = runs.refresh()
    assert read == ["done", "going"] and [row.state.name for row in first] == ["finished", "running"]
    assert runs.refresh() == first and read == ["done", "going"] and len(runs._readers) == 1
    going.learn(recorder, 2)
    assert [row.step for row in runs.refresh()] == [2, 2] and read[2:] == ["going"]
    recorder.finish("interrupted")
    recorder.run.close()
    assert [row.state.name for row in runs.refresh()] == ["finished", "interrupted"] and not runs._readers
    shutil.rmtree(tmp_path / "done")
    (only,) = runs.refresh()
    assert runs.paths == {only.key: tmp_path / "going"}


def test_many_runs_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"run-{number}", metrics='{"step":7}\n')
    now_s = 0.0

    def clock() -> float:  # each look at it takes a second
        nonlocal now_s
        now_s += 1.0
        return now_s

    runs, read = RunList(tmp_path, clock=clock), list[int]()
    while read[-1:] != [3]:
        read.append(sum(row.step == 7 for row in runs.refresh(within_s=3.0)))
        assert len(runs.paths) == 3 and len(read) < 9
    assert read[0] < 3


@pytest.mark.parametrize(("outcome", "state"), [("finished", "finished"), ("failed", "failed"), ("running", "unknown")])
def test_a_pipeline_has_a_row_and_its_stages_have_theirs(tmp_path: Path, outcome: str, state: str) -> None:
    run = FabricatedFleet(tmp_path / "p" / "stages" / "rl-1").make()
    write(tmp_path / "p" / "stages" / "rows-2", config="", manifest='{"format":3,"run":"rows"}')
    stages = [
        {"name": "rows", "state": "done", "folder": "stages/rows-2"},
        {"name": "rl", "state": "running", "folder": "stages/rl-1"},
        {"name": "last", "state": "due", "folder": "stages/last-3"},
    ]
    pipeline = {"name": "three stages", "outcome": outcome, "stages": stages}
    write(tmp_path / "p", pipeline=json.dumps(pipeline), config="", summary='{"outcome":"running"}')
    rows = rows_of(tmp_path)
    assert list(rows) == ["p", "p/stages/rl-1", "p/stages/rows-2"]
    whole, rl, made = rows.values()
    assert (whole.name, whole.step, whole.total_steps, whole.state.name) == ("three stages", 1, 3, state)
    assert whole.cost_usd == rl.cost_usd == RunData.load(run).summary["cost_usd"]
    assert (whole.figure, whole.value) == (rl.figure, rl.value) and whole.key != rl.key
    assert rl.pipeline == made.pipeline == whole.key and whole.pipeline == "" and made.state.name == "finished"


def test_a_pipeline_that_its_guard_ended_says_why(tmp_path: Path) -> None:
    ends = '{"event":"session_start"}\n{"event":"session_end","outcome":"failed","error":"GuardStop: quality falls"}\n'
    write(tmp_path / "p" / "stages" / "rl-1", config="", manifest='{"format":3}', events=ends)
    stages = [{"name": "rl", "state": "failed", "folder": "stages/rl-1"}]
    write(tmp_path / "p", pipeline=json.dumps({"outcome": "failed", "stages": stages}), config="")
    assert {(row.state.name, row.state.text) for row in rows_of(tmp_path).values()} == {
        ("guard", "The guard ended the run: quality falls")
    }


@pytest.mark.parametrize("text", ["{", "[]", '{"stages": 5}', '{"stages": [5, {"folder": ["x"], "state": {}}]}'])
def test_a_damaged_pipeline_has_a_row(tmp_path: Path, text: str) -> None:
    write(tmp_path / "p", pipeline=text)
    assert rows_of(tmp_path)["p"].state.name == "unknown"
