"""An event loop whose time jumps to the next timer: hours of waiting take no time, and every run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

WATCHED = 16
"""Rounds of the loop from one call of `watch` to the next."""


class Deadlock(AssertionError):
    """Everything waits and no timer is set: the real program would hang for ever."""


class _Jumping(selectors.DefaultSelector):
    """Never waits: where the real one would sleep, time jumps. Before it does, `look` is called; `watch` now and then,
    also where time stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.look: Callable[[], None] | None = None
        self.watch: Callable[[], None] | None = None
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        self._rounds += 1
        if self._rounds % WATCHED == 0:
            self._call(self.watch)
        if not events:
            if timeout is None:
                raise Deadlock
            if timeout > 0:
                self._call(self.look)
                self.now_s += timeout
        return events

    def _call(self, called: Callable[[], None] | None) -> None:
        if called is None:
            return
        both, (self.look, self.watch) = (self.look, self.watch), (None, None)
        called()
        self.look, self.watch = both  # after one that raised neither is called again while tasks are cancelled


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, look: Callable[[], None] | None = None, watch: Callable[[], None] | None = None) -> None:
        self._jumping = _Jumping()
        self._jumping.look, self._jumping.watch = look, watch
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(
    coroutine: Coroutine[Any, Any, T],
    *,
    look: Callable[[], None] | None = None,
    watch: Callable[[], None] | None = None,
) -> T:
    """Run to the end in virtual time.

    Args:
        look: called whenever all that happens at one moment has happened; what it raises ends the run.
        watch: called again and again, also while everything happens at one moment; what it raises ends the run.

    Raises:
        Deadlock: nothing would ever happen again.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(look, watch)) as runner:
        return runner.run(coroutine)
