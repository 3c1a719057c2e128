"""A run that ends with an error still writes its report."""

from __future__ import annotations

import errno
import io
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.schema import RunSpec
from tidemill.core.errors import GuardStop
from tidemill.jobs.train import train
from tidemill.jobs.train_supervised import train_supervised
from tidemill.runtime.backend import RuntimeBackend


def stopped_by_a_guard(*_: Any) -> AbstractAsyncContextManager[RuntimeBackend]:
    raise GuardStop("no sample gets a valid reward")


def run_until_the_guard(directory: Path) -> None:
    spec = RunSpec.model_validate({"model": {"source": "char"}, "run": {"dir": str(directory)}})
    with pytest.raises(GuardStop, match="no sample gets a valid reward"):
        train(spec, telemetry_stream=io.StringIO(), open_backend=stopped_by_a_guard)


def test_a_run_stopped_by_a_guard_writes_the_report_of_this_session(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("an earlier session's", encoding="utf-8")
    run_until_the_guard(tmp_path)
    assert "ended the run" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_stage_stopped_by_a_guard_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.jobs.train_supervised._train", stopped_by_a_guard)
    spec = RunSpec.model_validate({"model": {"source": "char"}, "run": {"dir": str(tmp_path)}})
    with pytest.raises(GuardStop, match="no sample gets a valid reward"):
        train_supervised(spec, "sft", telemetry_stream=io.StringIO())
    assert "ended the run" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_failing_report_does_not_hide_the_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tidemill.telemetry.report.write_report", full)
    run_until_the_guard(tmp_path)
    assert not (tmp_path / "report.html").exists()
