from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import UserError
from tidemill.telemetry.jsonl import JsonlWriter
from tidemill.telemetry.run_dir import RUN_FORMAT, RunDirectory, read_json, samples_name


def test_file_names_of_a_run_directory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "demo")
    named = (run.config, run.manifest, run.events, run.metrics, run.samples, run.ledger, run.checkpoints, run.summary)
    assert [path.name for path in (*named, run.report)] == [
        "config.toml",
        "manifest.json",
        "events.jsonl",
        "metrics.jsonl",
        "samples",
        "ledger.sqlite",
        "checkpoints",
        "summary.json",
        "report.html",
    ]
    assert not run.path.exists(), "naming a directory does not make it"


def test_opening_creates_and_a_second_opening_is_refused(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "deep" / "demo") as run:
        assert run.samples.is_dir() and run.checkpoints.is_dir()
        with pytest.raises(UserError) as caught:
            RunDirectory.open(run.path)
        assert caught.value.where == str(run.path) and "--run.dir" in caught.value.hint
    RunDirectory.open(run.path).close()


def test_the_error_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as run:
        run.events.write_text('{"event":"session_start","session":1,"elapsed_s":0,"pid":4711,"host":"mill"}\n')
        with pytest.raises(UserError, match="4711 on mill"):
            RunDirectory.open(tmp_path)


def test_a_run_exists_once_it_has_a_configuration(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as run:
        assert (run.exists, run.read_config()) == (False, None)
        run.write_config("[run]\n")
        assert (run.exists, run.read_config()) == (True, "[run]\n")


@pytest.mark.parametrize("below", ["", "inner"])
def test_a_file_in_the_way_is_an_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        RunDirectory.open(tmp_path / "file" / below)
    assert "--run.dir" in caught.value.hint


def test_an_unwritable_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(UserError) as caught:
        RunDirectory.open(tmp_path / "demo")
    assert caught.value.where.endswith("demo")


def test_a_full_disk_leaves_no_probe_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(UserError) as caught:
        RunDirectory.open(tmp_path)
    assert caught.value.where == str(tmp_path)
    assert not list(tmp_path.glob(".writable-*"))


def test_opening_removes_incomplete_lines_and_partial_files(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path).close()
    run = RunDirectory(tmp_path)
    run.events.write_bytes(b'{"event":"session_start","session":1,"elapsed_s":0.5}\n{"event":"roll')
    run.metrics.write_bytes(b'{"step":1,"session":1,"elapsed_s":4.25}\n{"st')
    (tmp_path / ".summary.json.partial").write_bytes(b"{")
    (run.samples / ".step_000002.jsonl.partial").write_bytes(b"{")
    (tmp_path / ".model.partial").mkdir()  # who makes such a folder also removes it
    with RunDirectory.open(tmp_path) as run:
        assert run.events.read_bytes().endswith(b"0.5}\n") and run.metrics.read_bytes().endswith(b"4.25}\n")
        assert (run.past.count, run.past.wall_s) == (1, 4.25)
    assert list(tmp_path.rglob("*.partial")) == [tmp_path / ".model.partial"]


def make_steps(run: RunDirectory, steps: int) -> None:
    for step in range(1, steps + 1):
        with run.metrics.open("a") as file:
            file.write(f'{{"step":{step}}}\n')
        (run.samples / samples_name(step)).write_text("{}\n")
        (run.samples / samples_name(step, "eval:held_out")).write_text("{}\n")


def test_rewinding_drops_later_metrics_and_samples(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as run:
        make_steps(run, 4)
        run.events.write_text('{"event":"rollout","step":4}\n')
        with run.metrics.open("a") as file:
            file.write('{"step":5')
        run.rewind(2)
        run.rewind(2)
        assert run.metrics.read_text() == '{"step":1}\n{"step":2}\n'
        assert [(step, purpose) for step, purpose, _ in run.sample_files()] == [
            (1, "eval-held_out"),
            (1, "train"),
            (2, "eval-held_out"),
            (2, "train"),
        ]
        assert run.events.read_text() == '{"event":"rollout","step":4}\n', "events only ever grow"


@pytest.mark.parametrize("change", [lambda run: run.rewind(1), RunDirectory.clear], ids=["rewind", "clear"])
@pytest.mark.parametrize("manifest", [None, {"format": RUN_FORMAT, "run_id": "x", "generation": 4}])
def test_the_generation_rises_before_and_after_metrics_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[RunDirectory], None], manifest: Any
) -> None:
    with RunDirectory.open(tmp_path) as run:
        make_steps(run, 3)
        if manifest is not None:
            run.write_manifest(manifest)
        before, seen = run.generation, list[int]()
        for name in ("truncate", "unlink"):
            monkeypatch.setattr(os, name, lambda *_, **__: seen.append(run.generation))
        change(run)
        monkeypatch.undo()
        assert set(seen) == {before + 1} and run.generation == before + 2
        assert run.read_manifest() == (manifest or {"format": RUN_FORMAT}) | {"generation": before + 2}
        run.refuse_other_format()


def test_rewinding_does_not_cut_off_an_open_writer(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as run:
        make_steps(run, 3)
        writer = JsonlWriter(run.metrics)
        run.rewind(1)
        writer.write({"step": 2})
        writer.close()
        assert run.metrics.read_text() == '{"step":1}\n{"step":2}\n'


def test_rewinding_to_step_0_drops_the_line_of_step_0(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as run:
        run.metrics.write_text('{"step":0}\n{"step":1}\n')
        run.rewind(0)
        assert run.metrics.read_text() == ""


def test_samples_names(tmp_path: Path) -> None:
    assert samples_name(12) == "step_000012.jsonl"
    assert samples_name(12, "eval:held_out") == "step_000012.eval-held_out.jsonl"
    assert samples_name(1, "../x") == "step_000001.---x.jsonl", "a purpose cannot lead out of the folder"
    run = RunDirectory(tmp_path)
    assert run.sample_files() == []


def test_missing_or_invalid_json_files_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    assert read_json(path) == {}
    for text in ("[]", "{", ""):
        path.write_text(text)
        assert read_json(path) == {}
    RunDirectory(tmp_path).write_summary({"steps": 3})
    assert RunDirectory(tmp_path).read_summary() == {"steps": 3}


def test_a_configuration_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.config.write_bytes(b"[run]\nname = '\xe9'\n")
    with pytest.raises(UserError) as caught:
        run.read_config()
    assert caught.value.where.endswith("config.toml")


@pytest.mark.parametrize("text", ["[", "x = ", '{"a": '])
def test_settings_and_objects_that_cannot_be_read_are_empty(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    run.config.write_text(text)
    run.manifest.write_text(text)
    assert run.read_settings() == run.read_manifest() == {}
