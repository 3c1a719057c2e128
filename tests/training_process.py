"""`tidemill train` in a separate process; its descendants are found by session."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.char_task import char_task
from tests.commands import run_here
from tests.forked import Forked

DEADLINE_S = 100.0
RECIPE = (
    char_task(layers=2, hidden_size=64)
    + """\
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
)
"""A recipe that is bit-exact under kills and resumes."""


@dataclass
class RunningProcess:
    """`tidemill train` and the processes it starts."""

    recipe: Path
    run: Path
    more: tuple[str, ...] = ()
    file_bytes: int | None = None  # limit on the size of a file

    def __post_init__(self) -> None:
        self._told = len(self.events())
        argv = ("train", f"@{self.recipe}", "--run.dir", str(self.run), *self.more)
        self.process = Forked(*argv, file_bytes=self.file_bytes)

    def events(self) -> list[dict[str, Any]]:
        """Events of all sessions of the run."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def told(self, event: str) -> int:
        """How often this process logged an event."""
        return sum(line["event"] == event for line in self.events()[self._told :])

    def wait_until(self, due: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not due():
            assert self.process.poll() is None, f"it ended before {what}: {self.process.communicate(DEADLINE_S)}"
            assert time.monotonic() < until, f"no {what}"
            time.sleep(0.02)

    def wait_for(self, event: str, times: int = 1) -> None:
        self.wait_until(lambda: self.told(event) >= times, f"{times} times {event}")

    def killed_when(self, due: Callable[[], bool], *, after_s: float = 0.0) -> bool:
        """Send SIGKILL `after_s` after `due`; returns whether the process was still running."""
        until = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and not due():
            assert time.monotonic() < until, "neither due nor ended in time"
            time.sleep(0.005)
        time.sleep(after_s)
        self.process.kill()
        _, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode in (0, -signal.SIGKILL), err
        return self.process.returncode != 0

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, code: int) -> str:
        """Wait until it and everything it started has ended; returns standard error."""
        _, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == code, err
        until = time.monotonic() + 10.0
        while (left := self.process.session()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left
        return err


def quiet_run(recipe: Path, run: Path, *more: str) -> None:
    """An undisturbed run in this process, with another hash seed than the killed ones."""
    ran = run_here("train", f"@{recipe}", "--run.dir", str(run), *more)
    assert ran.code == 0, ran.err


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def last_step(run: Path) -> int:
    """The newest step in metrics.jsonl; -1 without any."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError):
        return -1


def learned(run: Path) -> tuple[dict[str, Any], list[tuple[int, str]], dict[str, list[str]]]:
    """Results that must not depend on interruptions: figures, the weights after each step, every sample."""
    said = summary(run)
    names = ("steps", "policy_version", "weights_digest", "optimizer_steps", "tokens_trained", "eval")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = {
        path.name: [json.loads(line)["completion"] for line in path.read_text().splitlines()]
        for path in sorted((run / "samples").iterdir())
    }
    return {name: said[name] for name in names}, [(step["step"], step["weights_digest"]) for step in steps], samples
