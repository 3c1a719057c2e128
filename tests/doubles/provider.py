"""Providers of leases for tests: events sent by the test, or a script of events by time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from tidemill.core.records import LeaseEvent


class EventProvider:
    """Implements `core.protocols.Provider`: returns the events that a test sends with `tell`; raises exceptions."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.wanted: list[int] = []
        self.avoided: dict[str, float] = {}
        self._events: asyncio.Queue[LeaseEvent | Exception] = asyncio.Queue()

    def tell(self, event: LeaseEvent | Exception) -> None:
        self._events.put_nowait(event)

    def request_workers(self, workers: int) -> None:
        self.wanted.append(workers)

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event
        return event

    async def release(self, lease_id: str) -> None:
        self.released.append(lease_id)

    def avoid(self, machine: str, seconds: float) -> None:
        self.avoided[machine] = seconds

    async def close(self) -> None:
        pass


class ScriptedProvider(EventProvider):
    """Returns each event of a script at its time."""

    def __init__(self, script: Iterable[tuple[float, LeaseEvent]]) -> None:
        super().__init__()
        self._script = deque(sorted(script, key=lambda line: line[0]))

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        now_s = asyncio.get_running_loop().time()
        due_s = self._script[0][0] if self._script else float("inf")
        if due_s > now_s + timeout_s:
            await asyncio.sleep(timeout_s)
            return None
        await asyncio.sleep(max(0.0, due_s - now_s))
        return self._script.popleft()[1]
