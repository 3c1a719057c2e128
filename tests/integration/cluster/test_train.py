"""`tidemill train` on Ray: its driver is killed, its trainer is killed, and it finishes all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("ray")

RECIPE = """
runtime = "ray"
[model]
source = "char"
[model.char]
alphabet = "0123456789+=\\n"
hidden_size = 32
layers = 2
[task]
kind = "arithmetic"
shots = 0
[sampling]
max_new_tokens = 3
[engine]
slots = 16
[pool]
kind = "static"
workers = 1
[batch]
prompts = 8
group_size = 8
[trainer]
steps = 4000
threads = 1
[eval]
every_steps = 0
[checkpoint]
every_steps = 20
"""
DEADLINE_S = 60.0


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def _start(recipe: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tidemill", "train", f"@{recipe}", "--run.dir", str(run), "--json", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _events(run: Path) -> list[dict[str, object]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _wait_for(process: subprocess.Popen[str], run: Path, event: str, session: int) -> None:
    until = time.monotonic() + DEADLINE_S
    while not any(line["event"] == event and line["session"] == session for line in _events(run)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, f"no {event} in session {session}"
        time.sleep(0.05)


def _below(pid: int) -> Iterator[int]:
    """Every process below one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _below(child)


def _names(pids: list[int]) -> dict[int, str]:
    """Of those that are alive."""
    names = {}
    for pid in pids:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except FileNotFoundError:
            continue
        if line:  # a zombie has none
            names[pid] = line
    return names


def _all_gone(pids: list[int], within_s: float) -> None:
    until = time.monotonic() + within_s
    while _names(pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _names(pids)


def _checkpoints(run: Path, session: int) -> list[int]:
    lines = [line for line in _events(run) if line["event"] == "checkpoint" and line["session"] == session]
    return [int(str(line["step"])) for line in lines]


def test_a_killed_trainer_is_told_the_run_goes_on_and_a_killed_driver_leaves_nothing(
    recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = _start(recipe, run)
    _wait_for(first, run, "checkpoint", session=1)
    below = list(_below(first.pid))
    (trainer,) = [pid for pid, name in _names(below).items() if "ray::TrainerActor" in name]
    os.kill(trainer, signal.SIGKILL)
    out, err = first.communicate(timeout=30)
    assert first.returncode == 1, err
    message = json.loads(out)["error"]["message"]
    assert "the trainer died: its process was killed (SIGKILL or out of memory)" in message
    assert "run the same command again" in message
    _all_gone(below, within_s=5)

    second = _start(recipe, run)
    _wait_for(second, run, "pull", session=2)
    _wait_for(second, run, "checkpoint", session=2)
    assert _checkpoints(run, session=2)[0] == _checkpoints(run, session=1)[-1] + 20
    below = list(_below(second.pid))
    names = _names(below)
    for part in ("keeper", "gcs_server", "raylet", "ray::TrainerActor", "ray::RolloutActor"):
        assert any(part in name for name in names.values()), f"no {part} among {names}"
    second.kill()
    second.communicate(timeout=10)
    _all_gone(below, within_s=5)
