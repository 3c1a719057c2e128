from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_run import HELD_OUT, FabricatedRun
from tidemill.core.errors import UserError
from tidemill.telemetry.report import write_report
from tidemill.telemetry.run_data import RunData, read_run_samples
from tidemill.telemetry.run_dir import RUN_FORMAT, RunDirectory
from tidemill.telemetry.run_state import outcome_of

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
def test_the_outcome_is_read_from_the_events(events: list[dict[str, Any]], outcome: str) -> None:
    assert outcome_of(events, Path(__file__)) == outcome


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    data = RunData.read(FabricatedRun(tmp_path).make().path)
    assert (data.outcome, data.name, data.total_steps, data.damage) == ("finished", "smollm2-addition", 20, ())
    assert [line.step for line in data.metrics] == list(range(1, 21))
    assert len(data.values("reward_mean")) == 20
    assert (len(data.samples(training=True)), len(data.samples(training=False))) == (20 * 64, 5 * HELD_OUT)
    assert len(data.samples()) == len(read_run_samples(tmp_path)) == 20 * 64 + 5 * HELD_OUT
    assert [event["step"] for event in data.events_named("resume", "checkpoint")] == [10, 10, 20]
    assert list(data.sessions) == [1, 2] and [one.step for one in data.evaluations] == [0, 5, 10, 15, 20]
    assert data.summary == data.stored_summary | {"wall_s": data.summary["wall_s"]}
    assert data.setting("trainer", "learning_rate") == 1e-5 and data.setting("batch", "prompts") == 0


def test_the_configuration_is_validated_only_on_request(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_config("[trainer]\nsteps = 7\n")
    assert RunData.read(tmp_path).spec.trainer.steps == 7
    run.write_config("[trainer]\nstepz = 7\n")
    data = RunData.read(tmp_path)
    with pytest.raises(UserError, match="stepz"):
        _ = data.spec


def test_samples_are_read_from_a_folder_without_a_run_and_from_one_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.samples.mkdir()
    (run.samples / "step_000001.jsonl").write_text('{"step":1}\n{"step":1}\n')
    assert len(read_run_samples(tmp_path)) == len(read_run_samples(run.samples / "step_000001.jsonl")) == 2


def test_an_empty_directory_has_no_run_but_can_be_loaded(tmp_path: Path) -> None:
    data = RunData.load(RunDirectory(tmp_path))
    assert (*data.metrics, *data.events, data.config_text, data.total_steps) == ("", 0)
    with pytest.raises(UserError) as caught:
        RunData.read(tmp_path, where="--runs x")
    assert caught.value.where == "--runs x" and "--run.dir" in caught.value.hint
    with pytest.raises(UserError, match=r"no config\.toml"):
        _ = data.spec


def test_a_run_of_another_format_is_refused_and_unchanged(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path, steps=2).make()
    manifest = run.read_manifest()
    assert manifest["format"] == RUN_FORMAT
    del manifest["format"]  # as format 1 was written
    run.write_manifest(manifest)
    with run.events.open("ab") as file:
        file.write(b'{"torn')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for read in (
        RunDirectory.open,
        RunData.read,
        read_run_samples,
        write_report,
        lambda path: RunDirectory(path).read_config(),
    ):
        with pytest.raises(UserError) as caught:
            read(tmp_path)
        assert "format 1" in caught.value.what and f"format {RUN_FORMAT}" in caught.value.what
        assert caught.value.where == str(run.manifest) and "--run.dir" in caught.value.hint
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("manifest", [None, "", '{"format": '])
def test_a_run_killed_before_its_manifest_was_written_can_be_resumed(tmp_path: Path, manifest: str | None) -> None:
    run = RunDirectory(tmp_path)
    run.write_config("[run]\n")
    if manifest is not None:
        run.manifest.write_text(manifest)
    with RunDirectory.open(tmp_path) as opened:
        assert opened.read_config() == "[run]\n"
    assert RunData.read(tmp_path).config_text == "[run]\n"
