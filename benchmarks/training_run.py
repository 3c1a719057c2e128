"""Runs `tidemill train` in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.stopping import sigterm_as_ctrl_c

DEADLINE_S = 3600.0
STOPPING_S = 180.0
SAID = 2000  # characters of a failed run's last output


def train(
    recipe: Path,
    run_dir: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    progress: bool = True,
    deadline_s: float = DEADLINE_S,
) -> dict[str, Any]:
    """Run it and return the summary.

    Ctrl-C and SIGTERM are forwarded once: the run ends after the current step, with a checkpoint.

    Args:
        arguments: additional command-line arguments.
        environment: in addition to this process's environment.
        progress: show the run's output; else only the end of a failed run's.

    Raises:
        KeyboardInterrupt: it was interrupted; the same call resumes.
        RuntimeError: it failed.
        subprocess.TimeoutExpired: it exceeded the deadline and was stopped.
    """
    command = [sys.executable, "-m", "tidemill", "train", f"@{recipe}", *arguments]
    command += ["--json", "--run.dir", str(run_dir)]
    with (
        sigterm_as_ctrl_c(),
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=None if progress else subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches it only once
            env=os.environ | dict(environment or {}),
        ) as process,
    ):
        try:
            summary, said = process.communicate(timeout=deadline_s)
        except BaseException:
            _stop(process)
            raise
    if process.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` ended with {process.returncode}{_ending(said)}")
    found: dict[str, Any] = json.loads(summary)
    return found


def _ending(said: str | None) -> str:
    return f": {said[-SAID:]}" if said else ""


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOPPING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
