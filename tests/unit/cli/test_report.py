from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run


def test_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.telemetry.report.write_report", lambda run_dir: Path(run_dir) / "report.html")
    assert run("report", "runs/x").out == "runs/x/report.html\n"
    assert run("report", "runs/x", "--json").data == {"report": "runs/x/report.html", "notes": []}


def test_omitted_settings_are_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\ngarbage\n', encoding="utf-8")
    note = "1 of 2 lines of metrics.jsonl cannot be read"
    assert run("report", str(tmp_path)).out == f"{tmp_path}/report.html\n• {note}; left out\n"
    assert run("report", str(tmp_path), "--json").data["notes"] == [note]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "manifest.json"])
def test_a_directory_in_place_of_a_file(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    ran = run("report", str(tmp_path))
    assert ran.code == 2
    assert ran.err.startswith(f"error: {tmp_path / name}: is a directory\n")


def test_no_run_there(run: Run) -> None:
    ran = run("report", "nowhere")
    assert ran.code == 2
    assert ran.err.startswith("error: nowhere: ")
