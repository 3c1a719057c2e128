from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_run import FabricatedRun
from tidemill.config.guard import AmendConfig
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion, StepMetrics
from tidemill.jobs.rollback import roll_back
from tidemill.telemetry.live_state import LIVE
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_reader import RunReader


def kill(recorder: Recorder) -> None:
    """Close the files as a kill does: no session_end, and a line cut in its middle."""
    recorder._events.close()
    recorder._metrics.close()
    recorder.run.close()
    for log in (recorder.run.events, recorder.run.metrics):
        with log.open("ab") as file:
            file.write(b'{"step":99,"ev')


def step(recorder: Recorder, number: int, life: int) -> None:
    version = PolicyVersion(number=number, digest=f"{number:04d}")
    recorder.step(StepMetrics(step=number, version=version, optimizer_steps=1, values={"reward_mean": float(life)}))


@pytest.mark.parametrize("every", [1, 3, 7])
def test_ten_kills_and_two_rollbacks_leave_neither_a_gap_nor_a_duplicate(tmp_path: Path, every: int) -> None:
    fabricated, reader, writes = FabricatedRun(tmp_path), RunReader(tmp_path), 0
    life_of = dict[int, int]()  # the surviving history: which life wrote a step
    for life in range(1, 12):
        recorder = fabricated.session()
        last = max(life_of, default=0)
        begin = max(0, last - life % 4)
        recorder.resume(begin)
        if life in (4, 8):
            begin = begin // 2
            roll_back(recorder.run, recorder, target=begin, amend=AmendConfig())
        life_of = {at: one for at, one in life_of.items() if at <= begin}
        for number in range(begin + 1, begin + 7):
            step(recorder, number, life)
            life_of[number] = life
            writes += 1
            if writes % every == 0:
                reader.refresh()
                assert {line.step: line.values["reward_mean"] for line in reader.data.metrics} == life_of
                assert list(reader.data.events) == list(RunData.load(recorder.run).events)
        kill(recorder)
    reader.refresh()
    assert list(life_of) == list(range(1, len(life_of) + 1)), "the surviving history has every step once"
    assert list(reader.data.metrics) == read_metrics(tmp_path / "metrics.jsonl")
    assert reader.data.values("reward_mean") == list(life_of.values())
    assert reader.data.summary == RunData.load(recorder.run).summary and reader.data.summary["sessions"] == 11


def test_a_refresh_names_what_changed_and_reads_nothing_else(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path, steps=2).make()
    reader = RunReader(tmp_path)
    assert reader.refresh() == {"metrics", "events", "samples", "summary", "manifest", "live"}
    assert reader.refresh() == frozenset()
    data, cursor = reader.data, reader.cursor
    assert data.summary == RunData.load(run).summary and reader.state.name == "finished"

    def changed(path: Path, text: str) -> frozenset[str]:
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        return reader.refresh()

    assert changed(run.metrics, '{"step":3,"session":2}\n') == {"metrics"}
    assert reader.data is not data and reader.data.metrics is data.metrics and len(data.metrics) == 3
    assert reader.cursor.rpartition(".")[0] == cursor.rpartition(".")[0] and reader.cursor.endswith(".3")
    assert changed(run.events, '{"event":"rollout"}\n') == {"events"}
    assert changed(run.checks / "me.jsonl", "{}\n") == {"checks"}
    assert changed(run.samples / "step_000003.jsonl", "{}\n") == {"samples"}
    assert changed(run.summary, "\n") == {"summary"}
    assert changed(tmp_path / LIVE, "{") == {"live"} and reader.live is None
    run.rewind(2)
    assert reader.refresh() == {"metrics", "manifest", "samples"}
    assert reader.cursor.split(".")[1] > cursor.split(".")[1] and reader.data.metrics.last_step == 2


def unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.stat

    def refuse(self: Path, **named: Any) -> Any:
        if self.name == "metrics.jsonl":
            raise PermissionError(13, "Permission denied", str(self))
        return read(self, **named)

    monkeypatch.setattr(Path, "stat", refuse)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda path, _: (path / "manifest.json").write_text('{"run": "old"}'), "format 1"),
        (lambda path, _: ((path / "summary.json").unlink(), (path / "summary.json").mkdir()), "directory"),
        (unreadable, "permission denied"),
    ],
    ids=["older format", "a folder in the place of a file", "without permission"],
)
def test_a_run_that_cannot_be_read_has_a_reason_and_can_recover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Any, problem: str
) -> None:
    FabricatedRun(tmp_path, steps=2).make()
    manifest = (tmp_path / "manifest.json").read_bytes()
    reader = RunReader(tmp_path)
    with monkeypatch.context() as patched:
        harm(tmp_path, patched)
        assert reader.refresh() == {"manifest"} and problem in reader.problem.lower()
        assert reader.refresh() == frozenset(), "said once"
        assert reader.state.name == "unknown" and problem in reader.state.text.lower()
        with pytest.raises(UserError):
            _ = reader.data
    (tmp_path / "manifest.json").write_bytes(manifest)
    if (tmp_path / "summary.json").is_dir():
        (tmp_path / "summary.json").rmdir()
    assert reader.refresh() and reader.problem == "" and reader.data.metrics.last_step == 2


def test_files_of_another_program_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("epoch,loss\n")
    reader = RunReader(tmp_path)
    reader.refresh()
    with pytest.raises(UserError, match="another program"):
        _ = reader.data


def test_a_run_of_a_version_without_generations_is_followed(tmp_path: Path) -> None:
    fabricated = FabricatedRun(tmp_path, steps=4)
    reader, first = RunReader(tmp_path), fabricated.session()
    for number in range(1, 5):
        step(first, number, 1)
    assert "metrics" in reader.refresh()
    kill(first)
    second = fabricated.session()
    text = second.run.metrics.read_text().splitlines(keepends=True)
    second.run.metrics.write_text("".join(text[:2]))
    for number in range(3, 7):
        step(second, number, 2)
    cursor = reader.cursor
    reader.refresh()
    assert reader.data.values("reward_mean") == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert reader.cursor.rpartition(".")[0] != cursor.rpartition(".")[0]


def test_a_run_that_is_deleted_while_it_is_read_is_empty(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path / "run", steps=2).make()
    reader = RunReader(run.path)
    reader.refresh()
    for path in sorted(run.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
        reader.refresh()
        assert not reader.problem and isinstance(reader.data.summary, dict)
    run.path.rmdir()
    reader.refresh()
    assert (len(reader.data.metrics), len(reader.data.events), reader.state.name) == (0, 0, "unknown")
