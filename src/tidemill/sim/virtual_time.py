"""An event loop whose time jumps to the next timer: hours of waiting take no time, and every run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everything waits and no timer is set: the real program would hang for ever."""


class _Jumping(selectors.DefaultSelector):
    """Never waits: where the real one would sleep, time jumps. Before it does, `look` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.look: Callable[[], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock
            if timeout > 0:
                self._look()
                self.now_s += timeout
        return events

    def _look(self) -> None:
        look, self.look = self.look, None  # one that raises is not called again while tasks are cancelled
        if look is not None:
            look()
            self.look = look


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, look: Callable[[], None] | None = None) -> None:
        self._jumping = _Jumping()
        self._jumping.look = look
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(coroutine: Coroutine[Any, Any, T], *, look: Callable[[], None] | None = None) -> T:
    """Run to the end in virtual time.

    Args:
        look: called whenever all that happens at one moment has happened; what it raises ends the run.

    Raises:
        Deadlock: nothing would ever happen again.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(look)) as runner:
        return runner.run(coroutine)
