"""A pipeline of a robot that is killed in every stage gives the same bundle."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import DEADLINE_S, run_fork
from tests.forked import END_DEADLINE_S, Forked
from tests.unit.jobs.test_identify import write_logs

RECIPE = """\
[run]
name = "slide"
[robot]
task = "swingup"
worlds = 64
[control]
num_steps_per_env = 8
actor_hidden_dims = [8]
critic_hidden_dims = [8]
[trainer]
threads = 1
steps = 12
[checkpoint]
every_steps = 2

[[stage]]
name = "identify"
kind = "identify"
identify = { path = "logs", parameters = ["mass:pole", "damping:hinge"] }

[[stage]]
name = "optimise"
kind = "optimise"
optimise = { steps = 10, iterations = 20 }

[[stage]]
name = "train"
kind = "control"
robot.parameters = "stage:identify"
pool = { kind = "static", workers = 2 }

[[stage]]
name = "twin"
kind = "twin"
robot.parameters = "stage:identify"
[stage.twin]
policy = "stage:train"
engine = "mujoco"
mass = [0.8, 0.9, 1.1, 1.2]
friction = [0.8, 0.9, 1.1, 1.2]
min_success = 0.0
max_falls = 1.0

[[stage]]
name = "bundle"
kind = "bundle"
robot.parameters = "stage:identify"
bundle = { policy = "stage:train", twin = "stage:twin", deadline_ms = 20.0 }
"""
COMMAND = ("train", "@r.toml", "--run.dir=D")


def exists(pattern: str, folder: Path) -> Callable[[], bool]:
    return lambda: any(folder.glob(f"D/stages/{pattern}"))


def lines(pattern: str, number: int, folder: Path) -> Callable[[], bool]:
    return lambda: any(file.read_bytes().count(b"\n") >= number for file in folder.glob(f"D/stages/{pattern}"))


def inside(stage: str, folder: Path) -> Callable[[], bool]:
    """Whether the stage has done a part of its work."""
    return {
        "identify": exists("identify-*/config.toml", folder),
        "optimise": exists("optimise-*/config.toml", folder),
        "train": lines("train-*/metrics.jsonl", 5, folder),
        "twin": exists("twin-*/cells/*.json", folder),
        "bundle": exists("bundle-*/.bundle.partial/policy.onnx", folder),
    }[stage]


def kill_inside(stage: str, folder: Path) -> None:
    reached, deadline_s = inside(stage, folder), time.monotonic() + DEADLINE_S
    with Forked(*COMMAND, cwd=folder) as process:
        while process.poll() is None and not reached():
            assert time.monotonic() < deadline_s, f"the stage {stage} was not reached in {DEADLINE_S:g} s"
            time.sleep(0.005)
        process.kill()
        assert process.wait(END_DEADLINE_S) == -signal.SIGKILL, f"the pipeline ended before it was killed in {stage}"
        deadline_s = time.monotonic() + END_DEADLINE_S
        while orphans := process.session():
            assert time.monotonic() < deadline_s, f"left by the kill in {stage}: {orphans}"
            time.sleep(0.05)
    assert not list(folder.glob(f"D/stages/{stage}-*/stage.json")), f"{stage} was finished before the kill"


def bundle_digest(folder: Path) -> str:
    """Of all files but the latency report, as the stage computes it."""
    ran = run_fork(*COMMAND, "--json", cwd=folder)
    assert ran.code == 0, ran.err
    (sums,) = folder.glob("D/stages/bundle-*/bundle/SHA256SUMS")
    kept = "".join(line for line in sums.read_text().splitlines(keepends=True) if "latency.json" not in line)
    digest = hashlib.sha256(kept.encode()).hexdigest()
    assert ran.data["stages"][-1]["figures"]["digest"] == digest
    return digest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_in_every_stage_give_the_same_bundle(tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        write_logs(folder / "logs", logs=2, rows=100)
        (folder / "r.toml").write_text(RECIPE)
    for stage in ("identify", "optimise", "train", "twin", "bundle"):
        kill_inside(stage, killed)
    assert bundle_digest(killed) == bundle_digest(calm)
