"""Training on environments of other packages."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.control_runs import session
from tidemill.telemetry.events import read_events
from tidemill.telemetry.metrics import read_metrics

OURS = ("tidemill", "_tidemill", "msgspec", "_editable", "__editable__")


@pytest.fixture
def other_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with the packages of this one, but without Tidemill and msgspec."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    for entry in next(Path(path) for path in sys.path if path.endswith("site-packages")).iterdir():
        if not entry.name.startswith(OURS) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    return tmp_path / "venv" / "bin" / "python"


def policy(summary: dict[str, Any]) -> bytes:
    return (Path(summary["policy"]) / "policy.safetensors").read_bytes()


def test_an_rsl_rl_environment_in_another_interpreter_trains(tmp_path: Path, other_python: Path) -> None:
    for name in ("tidemill", "msgspec"):
        probe = subprocess.run([other_python, "-c", f"import {name}"], capture_output=True, check=False, cwd=tmp_path)
        assert f"No module named '{name}'".encode() in probe.stderr
    environment = {"task": "swingup", "environment": str(Path("tests/vecenvs.py").absolute()) + ":point", "history": 1}
    trainer = {"steps": 2, "threads": 1}

    there = session(tmp_path / "there", robot=environment | {"python": str(other_python)}, trainer=trainer)
    here = session(tmp_path / "here", robot=environment, trainer=trainer)

    assert policy(there) == policy(here)
    assert read_metrics(tmp_path / "there" / "metrics.jsonl")[-1].values["robot/episodes"] > 0
    page = (tmp_path / "there" / "report.html").read_text(encoding="utf-8")
    assert "It returns no last observations" in page.replace("The environment: it", "It")


def test_a_gymnasium_environment_trains_on_the_fleet_and_restarted_episodes_are_counted(tmp_path: Path) -> None:
    environment = {"environment": "tests/vecenvs.py:pendulum", "history": 1}
    pool = {"kind": "synthetic", "workers": 1, "mean_time_to_eviction_s": 1e9}
    first = session(tmp_path / "run", robot=environment, trainer={"steps": 1, "threads": 1}, pool=pool)
    assert first["finished"]
    session(tmp_path / "run", robot=environment, trainer={"steps": 2, "threads": 1}, pool=pool)

    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1].values
    assert last["robot/restarted"] == 64  # the second session has other simulators
    assert "lease" in {event["event"] for event in read_events(tmp_path / "run" / "events.jsonl")}
