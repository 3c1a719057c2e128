"""What every process of an actor does before anything else: it dies with its node, and hears of a coming end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

import ray._private.utils

HOOK = f"{__name__}.prepare"
"""Given to Ray as its `worker_process_setup_hook`."""

SIGTERM_GRACE_S = 5.0
"""What a SIGTERM leaves: Ray itself kills so long after one."""

PR_SET_PDEATHSIG = 1
_pipes: list[tuple[int, int]] = []


def prepare() -> None:
    """Runs in the main thread of a new worker process, the only one that may choose what signals do."""
    if sys.platform == "linux":  # the parent is the node's own server; without it the process may linger for minutes
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGTERM, _stay)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _pipes.append((reading, writing))
    # Ray would install its own handler after this hook, one that ends the process at once.
    ray._private.utils.set_sigterm_handler = lambda handler: None


def signals() -> int:
    """A file descriptor that can be read once a signal has come (one byte each, its number)."""
    assert _pipes, f"{HOOK} has not run in this process"
    return _pipes[0][0]


def _stay(number: int, frame: FrameType | None) -> None:
    """A warned worker uses its grace period; see `signals`."""
