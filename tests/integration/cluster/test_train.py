"""`tidemill train` on Ray, with a killed driver and with adapters."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.char_task import char_task
from tests.forked import Forked
from tests.processes import command_lines, processes_below

pytestmark = pytest.mark.xdist_group("ray")

RECIPE = (
    'runtime = "ray"\n'
    + char_task(layers=2)
    + """\
[sampling]
max_new_tokens = 3
[engine]
slots = 16
[pool]
kind = "static"
workers = 1
[batch]
prompts = 4
group_size = 4
[trainer]
steps = 4000
threads = 1
[eval]
every_steps = 0
[checkpoint]
every_steps = 5
"""
)
DEADLINE_S = 60.0


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def start(recipe: Path, run: Path, *more: str) -> Forked:
    return Forked("train", f"@{recipe}", "--run.dir", str(run), "--json", *more)


def _events(run: Path) -> list[dict[str, object]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(process: Forked, run: Path, event: str, session: int, times: int = 1) -> None:
    until = time.monotonic() + DEADLINE_S
    while sum(line["event"] == event and line["session"] == session for line in _events(run)) < times:
        assert process.poll() is None, process.communicate(DEADLINE_S)
        assert time.monotonic() < until, f"not {times} times {event} in session {session}"
        time.sleep(0.05)


def all_gone(pids: list[int], within_s: float) -> None:
    until = time.monotonic() + within_s
    while command_lines(pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not command_lines(pids)


def _checkpoints(run: Path, session: int) -> list[int]:
    lines = [line for line in _events(run) if line["event"] == "checkpoint" and line["session"] == session]
    return [int(str(line["step"])) for line in lines]


def test_a_run_with_a_killed_driver_leaves_no_process_and_can_be_resumed(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(recipe, run)
    wait_for(first, run, "checkpoint", session=1)
    wait_for(first, run, "pull", session=1)
    below = list(processes_below(first.pid))
    names = command_lines(below)
    for part in ("keeper", "gcs_server", "raylet", "ray::TrainerActor", "ray::RolloutActor"):
        assert any(part in name for name in names.values()), f"no {part} among {names}"
    first.kill()
    first.communicate(timeout=10)
    all_gone(below, within_s=5)

    steps = _checkpoints(run, session=1)[-1]
    second = start(recipe, run, "--trainer.steps", str(steps + 10))
    out, err = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, err
    summary = json.loads(out)  # the only text on standard output
    assert (summary["finished"], summary["steps"], summary["sessions"]) == (True, steps + 10, 2)
    assert _checkpoints(run, session=2)[-1] == steps + 10  # the first may have written one more, without its event


@pytest.mark.slow
def test_workers_pull_the_base_once_and_then_adapters(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rewards = '[{ kind = "length", target_tokens = 3 }]'  # every batch has a gradient
    ran = start(recipe, run, "--model.lora.rank=4", "--scoring.rewards", rewards, "--optimizer.learning_rate=1e-3")
    wait_for(ran, run, "checkpoint", session=1)
    wait_for(ran, run, "pull", session=1)
    wait_for(ran, run, "pull", session=1, times=3)
    ran.send_signal(signal.SIGINT)
    out, err = ran.communicate(timeout=DEADLINE_S)
    assert json.loads(out)["interrupted"], err
    published = {line["nbytes"] for line in _events(run) if line["event"] == "publish"}
    pulls = [int(str(line["nbytes"])) for line in _events(run) if line["event"] == "pull"]
    # 2 layers × rank 4 × (q, k, v, o: 4 × (32 + 32), gate, up, down: 3 × (32 + 96)) × 4 bytes
    assert published == {20_480}
    assert pulls[0] > 20_480 + 2 * (4 * 32 * 32 + 3 * 32 * 96) * 4  # includes the base
    assert all(nbytes < 20_480 + 20_000 for nbytes in pulls[1:])  # plus a manifest
    assert not [line for line in _events(run) if "quarantine" in str(line["event"])]
