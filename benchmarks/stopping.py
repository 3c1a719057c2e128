"""Ctrl-C and SIGTERM in benchmarks that keep what they measured: one line, and the exit code of an interrupt."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED_CODE = 130


def interruptible(main: Callable[[], int]) -> int:
    """The exit code of `main`, or of an interrupt, which is told in words instead of a traceback."""
    try:
        with sigterm_as_ctrl_c():
            return main()
    except KeyboardInterrupt:
        print("stopped; what was measured is kept, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED_CODE


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """A run in progress has handlers of its own meanwhile: it ends with a checkpoint and says `interrupted`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
