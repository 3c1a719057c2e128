"""kill -9 at any instant: the resumed run ends with the very weights of an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = """
[model]
source = "char"
[model.char]
alphabet = "0123456789+=\\n"
hidden_size = 64
layers = 2
[task]
kind = "arithmetic"
shots = 0
[scoring]
rewards = [{ kind = "exact" }, { kind = "regex", pattern = '^\\d', weight = 0.5 }]
[sampling]
max_new_tokens = 12
stop = ["no such string"]
[engine]
slots = 16
batch_invariant = true
tick_s = 0.02
[batch]
prompts = 4
group_size = 4
minibatches = 2
[optimizer]
learning_rate = 1e-3
[trainer]
steps = 8
threads = 1
[eval]
every_steps = 4
prompts = 4
[checkpoint]
every_steps = 2
"""
WITH_ADAPTER = """
[model.lora]
rank = 4
[algorithm]
kl_beta = 0.01
"""
DEADLINE_S = 100.0


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def start(recipe: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tidemill", "train", f"@{recipe}", "--run.dir", str(run), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


def kill_when(process: subprocess.Popen[str], due: Callable[[], bool]) -> bool:
    """SIGKILL as soon as `due()` holds; False when the process ended first."""
    until = time.monotonic() + DEADLINE_S
    while process.poll() is None:
        assert time.monotonic() < until, "neither due nor ended in time"
        if due():
            process.kill()
            process.communicate(timeout=DEADLINE_S)
            return process.returncode == -signal.SIGKILL
        time.sleep(0.0005)
    process.communicate(timeout=DEADLINE_S)
    return False


def last_step(run: Path) -> int:
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError):
        return -1


def after(run: Path, step: int, delay_s: float) -> Callable[[], bool]:
    """Due so long after the session now starting has told of `step` or a later one."""
    size = (run / "events.jsonl").stat().st_size if run.exists() else 0
    reached: list[float] = []

    def due() -> bool:
        started = run.exists() and (run / "events.jsonl").exists() and (run / "events.jsonl").stat().st_size > size
        if not reached and started and last_step(run) >= step:
            reached.append(time.monotonic())
        return bool(reached) and time.monotonic() >= reached[0] + delay_s

    return due


def kept(summary: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on interruptions."""
    names = (
        "steps",
        "policy_version",
        "weights_digest",
        "optimizer_steps",
        "tokens_generated",
        "tokens_trained",
        "eval",
    )
    return {name: summary[name] for name in names}


def metrics(run: Path) -> list[tuple[int, str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["weights_digest"], line.get("reward_mean", 0.0)) for line in lines]


def samples(run: Path) -> dict[str, list[Any]]:
    return {
        path.name: [json.loads(line)["completion"] for line in path.read_text().splitlines()]
        for path in sorted((run / "samples").iterdir())
    }


@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", ["", WITH_ADAPTER], ids=["whole", "adapter"])
def test_killed_at_random_moments_and_inside_a_checkpoint(more: str, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(RECIPE + more)
    quiet, torn = tmp_path / "quiet", tmp_path / "torn"
    expected = finish(start(recipe, quiet))
    assert expected["optimizer_steps"] > 8  # it learned something, or equal weights would say nothing
    rng = random.Random(0)
    kills = 0
    for wanted in (0, 1, 3, 6):
        kills += kill_when(start(recipe, torn), after(torn, wanted, rng.uniform(0.0, 0.15)))
    assert kills >= 3, "the kills came too late to show anything"
    checkpoints = torn / "checkpoints"
    # A checkpoint of so small a model is written in milliseconds: this may miss it, and then changes nothing.
    kill_when(start(recipe, torn), lambda: any(checkpoints.glob(".writing-*")))
    summary = finish(start(recipe, torn))
    assert kept(summary) == kept(expected)
    assert metrics(torn) == metrics(quiet)
    assert samples(torn) == samples(quiet)
    assert not list(checkpoints.glob(".*"))


@pytest.mark.timeout(200)
def test_interrupted_cleanly_then_resumed_then_told_that_it_has_finished(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(recipe, run)
    until = time.monotonic() + DEADLINE_S
    while last_step(run) < 2 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert json.loads(out)["interrupted"] is True
    stopped_at = json.loads((run / "summary.json").read_text())["steps"]
    assert 2 <= stopped_at < 8
    assert (run / "checkpoints" / f"step_{stopped_at}").is_dir()
    assert finish(start(recipe, run))["steps"] == 8
    again = start(recipe, run)
    out, err = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0
    assert "already finished" in err
    assert json.loads(out)["steps"] == 8


@pytest.mark.timeout(100)
def test_a_run_directory_belongs_to_one_configuration(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(start(recipe, run))
    before = (run / "metrics.jsonl").read_bytes()
    command = [sys.executable, "-m", "tidemill", "train", f"@{recipe}", "--run.dir", str(run), "--batch.prompts", "8"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert refused.returncode == 2
    assert "batch.prompts = 8, the run has 4" in refused.stderr
    assert (run / "metrics.jsonl").read_bytes() == before
