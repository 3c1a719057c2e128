"""A run that loses its Ray cluster ends soon, with the reason, and leaves no process or folder."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.integration.cluster.test_train import all_gone, recipe, start, wait_for
from tests.processes import command_lines, processes_below

__all__ = ["recipe"]
pytestmark = pytest.mark.xdist_group("ray")


def _folders(names: dict[int, str]) -> set[Path]:
    """Folders of local clusters, from the command lines of their processes."""
    return {Path(found) for name in names.values() for found in re.findall(r"=(/[^ ]*tidemill-ray-\w+)", name)}


@pytest.mark.parametrize(
    "started", ["raylet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cluster.keeper", "gcs_server"))]
)
def test_a_run_stopped_while_ray_starts_leaves_no_process(recipe: Path, tmp_path: Path, started: str) -> None:
    process = start(recipe, tmp_path / "run")
    until, names = time.monotonic() + 60.0, dict[int, str]()
    while not any(started in name for name in names.values()):
        assert process.poll() is None
        assert time.monotonic() < until
        names = command_lines(processes_below(process.pid))
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    all_gone(list(names), within_s=3)
    assert not any(folder.exists() for folder in _folders(names))


@pytest.mark.parametrize(
    ("part", "within_s", "said"),
    [
        # The last look that succeeded was up to 12 s before (one a second, on a busy machine), then 20 s without one
        # and 5 s each for three clean-up calls. Ray would end the process without a message after 60 s.
        pytest.param("gcs_server", 50.0, "the Ray cluster has not answered for", marks=pytest.mark.slow),
        # test_workers.py loses a trainer, and test_train.py leaves nothing of a killed run.
        pytest.param("runtime.cluster.keeper", 40.0, "the trainer died", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_loses_its_cluster_reports_it_and_leaves_no_folder(
    recipe: Path, tmp_path: Path, part: str, within_s: float, said: str
) -> None:
    run = tmp_path / "run"
    process = start(recipe, run)
    wait_for(process, run, "pull", session=1)
    wait_for(process, run, "checkpoint", session=1)
    names = command_lines(processes_below(process.pid))
    (folder,) = _folders(names)
    assert folder.is_dir()
    (victim,) = (pid for pid, name in names.items() if part in name)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    out, _ = process.communicate(timeout=90)

    assert time.monotonic() - began < within_s
    assert process.returncode == 1
    error = json.loads(out)["error"]
    assert error["kind"] == "lost"
    assert said in error["message"]
    assert "run the same command again" in error["message"]
    assert not folder.exists()
    all_gone(list(names), within_s=2)
