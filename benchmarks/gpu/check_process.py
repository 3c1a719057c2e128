"""Runs a program with a limit, and ends it with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.origin import ROOT

MARK = "TIDEMILL_GPU_CHECK"
"""Environment variable that marks the processes of a check: some lead process groups of their own."""
GRACE_S = 3.0  # for a stopped check to end by itself


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended."""

    code: int  # negative: the signal that killed it
    timed_out: bool
    seconds: float
    left_behind: int  # processes that it left running, and that were killed


def run_to_end(command: Sequence[str], *, limit_s: float, log: IO[bytes]) -> Ended:
    """Run a command in a process group of its own, with its output in `log`.

    Raises:
        OSError: it cannot be started.
    """
    mark = uuid.uuid4().hex
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        start_new_session=True,
        env=os.environ | {MARK: mark, "PYTHONUNBUFFERED": "1"},
    )
    timed_out = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:  # also at Ctrl-C
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        left_behind = _kill_marked(mark)
    return Ended(
        code=process.returncode,
        timed_out=timed_out,
        seconds=time.monotonic() - began,
        left_behind=0 if timed_out else left_behind,
    )


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill_marked(mark: str) -> int:
    """Kill processes of a check that left its group; Linux only. Returns their number."""
    killed = set[int]()
    for _ in range(5):  # one may start another meanwhile
        found = set(_marked(f"{MARK}={mark}".encode())) - killed
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    return len(killed)


def _marked(entry: bytes) -> Iterator[int]:
    """Live processes with an entry in their environment."""
    processes = Path("/proc")
    for folder in processes.iterdir() if processes.is_dir() else ():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
