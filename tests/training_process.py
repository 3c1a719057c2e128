"""`tidemill train` in a process of its own, found again with all it started by a mark in their environment."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 100.0


@dataclass
class RunningProcess:
    """`tidemill train` and whatever it starts."""

    recipe: Path
    run: Path
    more: tuple[str, ...] = ()
    file_bytes: int | None = None  # no file may grow beyond
    mark: str = field(default_factory=lambda: f"TIDEMILL_CHAOS_RUN={uuid.uuid4().hex}")

    def __post_init__(self) -> None:
        self._told = len(self.events())
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidemill", "train", f"@{self.recipe}", "--run.dir", str(self.run), *self.more],
            env=os.environ | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self.file_bytes is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (self.file_bytes, self.file_bytes))

    def events(self) -> list[dict[str, Any]]:
        """Of every process that ran there."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def told(self, event: str) -> int:
        """How often this process told of it."""
        return sum(line["event"] == event for line in self.events()[self._told :])

    def wait_until(self, due: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not due():
            assert self.process.poll() is None, f"it ended before {what}: {self.process.communicate()}"
            assert time.monotonic() < until, f"no {what}"
            time.sleep(0.02)

    def wait_for(self, event: str, times: int = 1) -> None:
        self.wait_until(lambda: self.told(event) >= times, f"{times} times {event}")

    def parts(self, name: str = "") -> list[int]:
        """Processes alive with that in their command lines, the first one's parent or not."""
        return [pid for pid, command in _marked(self.mark).items() if name in command]

    def killed_when(self, due: Callable[[], bool], *, after_s: float = 0.0) -> bool:
        """SIGKILL, so long after it was due; whether it had not ended by itself."""
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
        """Wait for its end, and for that of everything it started; returns what it wrote to standard error."""
        _, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == code, err
        until = time.monotonic() + 10.0
        while (left := _marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left
        return err


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def last_step(run: Path) -> int:
    """The newest in metrics.jsonl; -1 before there is any."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError):
        return -1


def learned(run: Path) -> tuple[dict[str, Any], list[tuple[int, str]], dict[str, list[str]]]:
    """What must not depend on anything that happened: figures, the weights after each step, every sample."""
    said = summary(run)
    names = ("steps", "policy_version", "weights_digest", "optimizer_steps", "tokens_trained", "eval")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = {
        path.name: [json.loads(line)["completion"] for line in path.read_text().splitlines()]
        for path in sorted((run / "samples").iterdir())
    }
    return {name: said[name] for name in names}, [(step["step"], step["weights_digest"]) for step in steps], samples


def _marked(mark: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark.encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
        if command:  # a zombie has none
            found[int(folder.name)] = command
    return found
