"""An event loop whose time jumps to the next timer: hours of waiting take no time, and every run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everything waits and no timer is set: the real program would hang for ever."""


class _Jumping(selectors.DefaultSelector):
    """Never waits: where the real one would sleep, time jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock
            self.now_s += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time.

    Raises:
        Deadlock: nothing would ever happen again.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
