from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = "tidemill.runtime.cluster.launch_node"
START_S = 30.0


def command(folder: Path, role: str = "worker", marker: str = "") -> list[str]:
    return [sys.executable, "-m", MODULE, role, f"--folder={folder}", "--cpus=1", f"--marker={marker}"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text("", encoding="utf-8")
    (tmp_path / "marker").write_text("abc", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("below", "marker", "variables", "message"),
    [
        ("elsewhere", "", {}, "the job's folder is not on "),
        ("", "other", {}, "has another folder of this name than the machine of `tidemill deploy apply`"),
        ("", "", {"SLURM_HET_SIZE": "2"}, "a heterogeneous job is preempted and requeued as one"),
    ],
)
def test_a_machine_on_which_the_job_cannot_run(
    folder: Path, below: str, marker: str, variables: dict[str, str], message: str
) -> None:
    done = subprocess.run(
        command(folder / below, "head", marker),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 2 and message in done.stderr


def test_a_worker_ends_with_the_run(folder: Path) -> None:
    (folder / "head.json").write_text('{"exit_code": 3}', encoding="utf-8")
    done = subprocess.run(command(folder, marker="abc"), capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0 and "the run has ended with code 3" in done.stderr


def test_sigterm_ends_a_worker_that_waits_for_a_head(folder: Path) -> None:
    # The address of a lost head does not answer.
    (folder / "head.json").write_text('{"start": "1.0", "address": "127.0.0.1:9", "token": "t"}', encoding="utf-8")
    with subprocess.Popen(command(folder), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith("waits for the head of the run\n")
        process.terminate()
        assert process.wait(START_S) == 143
