"""A run started by a benchmark is interrupted with it, and a failed one is reported with its error."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from benchmarks.training_run import train
from tests.processes import command_lines, processes_below
from tidemill.config.load import RECIPES
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.run_dir import RunDirectory

RECIPE = RECIPES / "char-addition.toml"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STEP_S = 100.0  # limit for the first step


@pytest.mark.slow
def test_an_interrupted_benchmark_leaves_a_resumable_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")

    def interrupt() -> None:
        deadline = time.monotonic() + STEP_S
        while time.monotonic() < deadline and not (run.metrics.is_file() and len(read_metrics(run.metrics)) > 1):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    settings = ["--checkpoint.every_steps", "0"]  # a killed run leaves none
    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, run.path, "--trainer.steps", "100000", *settings, environment=ONE_THREAD, progress=False)

    assert [line for line in command_lines(processes_below(os.getpid())).values() if str(run.path) in line] == []
    made = read_metrics(run.metrics)[-1].step
    assert [folder.name for folder in run.checkpoints.glob("step_*")] == [f"step_{made}"]

    more = ["--trainer.steps", str(made + 1), *settings]
    summary = train(RECIPE, run.path, *more, environment=ONE_THREAD, progress=False)
    assert (summary["outcome"], summary["steps"], summary["sessions"]) == ("finished", made + 1, 2)


def test_a_failed_run_is_reported_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 2: (.|\n)*trainer\.stepps"):
        train(RECIPE, tmp_path / "run", "--trainer.stepps", "1", environment=ONE_THREAD, progress=False)
