"""What a real worker would have told before it vanished, told when it vanishes."""

from __future__ import annotations

import asyncio

from tidemill.core.protocols import Provider
from tidemill.core.records import LeaseEnded, LeaseEvent
from tidemill.sim.worker import SimulatedHost


class LastWords:
    """Implements `core.protocols.Provider` over another one, for workers that do not report tick by tick: before a
    lease ends, its worker tells of everything up to its last tick, as a real one would have.

    Args:
        tick_s: of a real worker; what it has made since its last tick is lost.
    """

    def __init__(self, inner: Provider, host: SimulatedHost, *, tick_s: float = 0.1) -> None:
        self._inner, self._host, self._tick_s = inner, host, tick_s

    def want(self, workers: int) -> None:
        self._inner.want(workers)

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        event = await self._inner.next_event(timeout_s)
        if isinstance(event, LeaseEnded) and (worker := self._host.workers.get(event.lease_id)) is not None:
            worker.flush()
            await asyncio.sleep(self._tick_s)  # the report is read; what is made meanwhile is lost
        return event

    async def release(self, lease_id: str) -> None:
        await self._inner.release(lease_id)

    async def close(self) -> None:
        await self._inner.close()
