"""GPUs that either generate or learn: the reserved engine and the trainer take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from tidemill.core.clock import Clock
from tidemill.core.records import SampleId
from tidemill.sim.worker import SimulatedWorker


class SharingWorker(SimulatedWorker):
    """An engine on the trainer's GPUs. Learning begins when it has nothing to do; what comes meanwhile waits."""

    def __init__(self, *positional: Any, clock: Clock, **named: Any) -> None:
        super().__init__(*positional, clock=clock, **named)
        self._now, self._vacated = clock.now, asyncio.Event()

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """The GPUs are the trainer's inside the block."""
        while True:
            self.engine.advance(self._now())
            if not self.engine.running:
                break
            self._vacated.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self.engine.next_change_s()):
                    await self._vacated.wait()
        self.engine.pause(self._now())
        try:
            yield
        finally:
            self.engine.resume(self._now())
            self._wake()

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await super().abort(sample_ids)
        self._vacated.set()
