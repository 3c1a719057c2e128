"""An event loop in virtual time, and simulated cores and threads."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tidemill.core.protocols import Clock
from tidemill.sim.simulated_trainer import Uplink

T = TypeVar("T")

WATCHED = 16
"""Loop iterations between two calls of `watch`."""


class Deadlock(AssertionError):
    """All tasks wait and no timer is set: the real program would hang."""


class _Jumping(selectors.DefaultSelector):
    """Never sleeps: time jumps instead. Calls `look` before each jump, and `watch` every `WATCHED` iterations."""

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
        self.look, self.watch = both  # if one raised, neither is called again during cancellation


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
    """Run a coroutine to completion in virtual time.

    Args:
        look: called after all events of one moment; an exception ends the run.
        watch: called repeatedly, also within one moment; an exception ends the run.

    Raises:
        Deadlock: all tasks wait and no timer is set.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(look, watch)) as runner:
        return runner.run(coroutine)


class Cores:
    """Cores shared equally by concurrent work, at most one core each."""

    def __init__(self, cores: float, clock: Clock) -> None:
        self._sharing = Uplink(cores, 1.0, clock)

    async def work(self, seconds: float) -> None:
        """Return after `seconds` of one core's time."""
        if seconds > 0:
            await self._sharing.carry(seconds)


class VirtualThread:
    """Implements `core.protocols.Compute` in virtual time: calls run in order and take the time that they `spend`."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._turn = cores, asyncio.Lock()
        self.spent_s = 0.0

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` now; return its result after the time that it spent."""
        async with self._turn:
            before_s = self.spent_s
            result = function()
            await self._cores.work(self.spent_s - before_s)
            return result

    def spend(self, seconds: float) -> None:
        """Add time to the current call of `run`."""
        self.spent_s += seconds

    async def work(self, seconds: float) -> None:
        """Spend time without a result."""
        await self.run(lambda: self.spend(seconds))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Reserve the thread for the block, which requests core time itself."""
        async with self._turn:
            yield
