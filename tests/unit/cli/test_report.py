from __future__ import annotations

from pathlib import Path

from tests.unit.cli.conftest import Pretend, Run


def test_report(run: Run, pretend: Pretend) -> None:
    pretend("tidemill.telemetry.report", "write_report", lambda run_dir: Path(run_dir) / "report.html")
    assert run("report", "runs/x").out == "runs/x/report.html\n"
    assert run("report", "runs/x", "--json").data == {"report": "runs/x/report.html"}


def test_no_run_there(run: Run) -> None:
    ran = run("report", "nowhere")
    assert ran.code == 2
    assert ran.err.startswith("error: nowhere: ")
