"""An event loop in virtual time, and the cores and threads of a simulated machine."""

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


class Cores:
    """Whoever computes has a core, or an equal part of all where there are more than cores."""

    def __init__(self, cores: float, clock: Clock) -> None:
        self._sharing = Uplink(cores, 1.0, clock)

    async def work(self, seconds: float) -> None:
        """Returns when so many seconds of one core's time are spent."""
        if seconds > 0:
            await self._sharing.carry(seconds)


class VirtualThread:
    """Implements `core.protocols.Compute` in virtual time: calls run one at a time, in the order asked for, and take
    what they say they spend."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._turn = cores, asyncio.Lock()
        self.spent_s = 0.0

    async def run(self, function: Callable[[], T]) -> T:
        """What the function does is done when it begins, and known when its time is over."""
        async with self._turn:
            before_s = self.spent_s
            result = function()
            await self._cores.work(self.spent_s - before_s)
            return result

    def spend(self, seconds: float) -> None:
        """Within a call of `run`."""
        self.spent_s += seconds

    async def work(self, seconds: float) -> None:
        """A call that does nothing else."""
        await self.run(lambda: self.spend(seconds))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The thread is the block's own; what the block computes there, it asks of the cores itself."""
        async with self._turn:
            yield
