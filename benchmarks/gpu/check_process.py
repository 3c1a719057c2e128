"""Runs a program with a limit, and ends it with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.origin import ROOT

MARK = "TIDEMILL_GPU_CHECK"
"""Environment variable that marks the processes of a check: some lead process groups of their own. SESSION:NUMBER."""
GRACE_S = 3.0  # for a stopped check, and for what an ended one left, to end by itself
WATCH_S = 1.0


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
    mark = f"{os.getpid()}:{uuid.uuid4().hex}"
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
    timed_out, left_behind = False, 0
    try:
        process.wait(limit_s)
        left_behind = _left_behind(mark)
    except subprocess.TimeoutExpired:
        timed_out = True
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:  # also at Ctrl-C
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        _kill_marked(mark)
    return Ended(
        code=process.returncode,
        timed_out=timed_out,
        seconds=time.monotonic() - began,
        left_behind=left_behind,
    )


def end_with_session() -> None:
    """In a check: end it, and all that it started, when the session is killed and cannot do it."""
    mark = os.environ.get(MARK, "")
    if not mark:
        return

    def watch() -> None:
        while os.getppid() == int(mark.partition(":")[0]):
            time.sleep(WATCH_S)
        _kill_marked(mark)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _left_behind(mark: str) -> int:
    """The number of processes that an ended check left, and that do not end by themselves."""
    until = time.monotonic() + GRACE_S
    while (running := len(list(_marked(mark)))) and time.monotonic() < until:
        time.sleep(0.1)
    return running


def _kill_marked(mark: str) -> None:
    """Kill processes of a check, also those that left its group, but this one; Linux only."""
    killed = {os.getpid()}
    for _ in range(5):  # one may start another meanwhile
        found = set(_marked(mark)) - killed
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _marked(mark: str) -> Iterator[int]:
    """Live processes with the mark in their environment."""
    entry, processes = f"{MARK}={mark}".encode(), Path("/proc")
    for folder in processes.iterdir() if processes.is_dir() else ():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
