"""Ctrl-C and SIGTERM in long benchmarks: one line, and the exit code of an interrupt."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED_CODE = 130


def interruptible(main: Callable[[], int], *, keeps: bool = False) -> int:
    """The exit code of `main`, or of an interrupt, which prints a line instead of a traceback.

    Args:
        keeps: finished runs are written at once, and not repeated without --again.
    """
    try:
        with sigterm_as_ctrl_c():
            return main()
    except KeyboardInterrupt:
        rest = "finished runs are kept; without --again, the command measures the missing ones"
        print(f"stopped; {rest if keeps else 'nothing was written'}", file=sys.stderr)
        return INTERRUPTED_CODE


@contextmanager
def children_take_ctrl_c() -> Iterator[None]:
    """SIGINT interrupts the processes that the block starts, also where this one ignores it: a script's `command &`."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, lambda *_: None)  # a new program inherits SIG_IGN, but no handler
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C, except during a run, which handles it by writing a checkpoint."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
