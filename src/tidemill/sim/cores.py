"""One machine that everything of a run shares: its cores, and the threads that take turns on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from tidemill.core.clock import Clock
from tidemill.sim.uplink import Uplink

T = TypeVar("T")


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
