"""Grants leases from a timetable of machines: the provider of every simulated pool."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidemill.core.protocols import Clock
from tidemill.core.records import Lease, LeaseEnded, LeaseEvent, LeaseGranted, LeaseNoticed, Record


class Change(Record):
    """One place of the market changes: its machine comes up, gets an eviction notice, or goes down."""

    time_s: float  # since the start of the timetable
    place: int  # from 0; a new machine takes a free place
    to: Literal["up", "noticed", "down"]
    deadline_s: float = 0.0  # of a noticed one: when it goes down


Timetable: TypeAlias = Iterator[Change]
"""Changes in order of time, possibly infinite, independent of leases: equal seeds give equal markets."""


CLOCK_RESOLUTION_S = 1e-6  # a timer may fire this much early


class BackOff(Record):
    """Delay before a released place is leased again, so that a worker that always fails does not restart in a loop."""

    first_s: float = 1.0  # doubles with each failure
    longest_s: float = 60.0
    settled_s: float = 60.0  # a lease held this long resets the delay

    def after(self, failures: int) -> float:
        """Seconds to wait after `failures` consecutive leases shorter than `settled_s`."""
        return float(min(self.longest_s, self.first_s * 2.0 ** min(failures, 64)))


@dataclass(slots=True)
class _Place:
    up: bool = False
    noticed: bool = False
    lease: Lease | None = None
    retry_s: float = -math.inf  # on the run's clock: end of the back-off
    failures: int = 0
    avoided_s: float = -math.inf  # until then

    @property
    def free_s(self) -> float:
        """Earliest time of the next lease."""
        return max(self.retry_s, self.avoided_s)

    @property
    def offered(self) -> bool:
        return self.up and not self.noticed and self.lease is None


class ScheduledProvider:
    """Leases the machines of a timetable. The timetable starts when this object is created.

    A lease ends exactly once: its machine goes down (`LeaseEnded`), or `release` returns it; no later event names it.
    Wanting fewer workers grants no new leases and ends none. A released machine may be leased again after a back-off,
    under a new lease id, unless it has a notice. Events are computed when requested, so a machine that came and went
    between two requests is never granted.

    Args:
        most: maximum number of leases, whatever `request_workers` asks for. A machine beyond
            the limit replaces one that goes down.
        session: number of the process working on the run. It is part of lease ids, so a resumed run reuses none.
        end_s: length of the timetable's source in seconds; `at_end` is called once after it.
    """

    def __init__(
        self,
        timetable: Timetable,
        *,
        clock: Clock,
        session: int,
        price_usd_per_hour: float = 0.0,
        most: float = math.inf,
        back_off: BackOff | None = None,
        end_s: float = math.inf,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._timetable, self._clock, self._session, self._price = timetable, clock, session, price_usd_per_hour
        self._back_off = back_off or BackOff()
        self._start_s = clock.now()
        self._end_s, self._at_end = end_s, at_end
        self._next_change = next(timetable, None)
        self._places: dict[int, _Place] = {}
        self._held: dict[str, _Place] = {}
        self._events = deque[LeaseEvent]()
        self._most = most
        self._wanted = most  # everything, until `request_workers` is called
        self._granted = 0
        self._woken = asyncio.Event()

    def request_workers(self, workers: int) -> None:
        self._wanted = min(workers, self._most)
        self._woken.set()

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        deadline_s = self._clock.now() + timeout_s
        while True:
            now_s = self._clock.now()
            self._catch_up(now_s)
            if self._events:
                return self._events.popleft()
            if now_s >= deadline_s - CLOCK_RESOLUTION_S:
                return None
            self._woken.clear()
            times = [deadline_s]  # also of the next change, and of the next end of a back-off
            if self._next_change is not None:
                times.append(self._start_s + self._next_change.time_s)
            if len(self._held) < self._wanted:
                times += [place.free_s for place in self._places.values() if place.offered]
            with suppress(TimeoutError):
                async with asyncio.timeout(min(times) - now_s):
                    await self._woken.wait()

    async def release(self, lease_id: str) -> None:
        self._events = deque(
            event
            for event in self._events
            if (event.lease.lease_id if isinstance(event, LeaseGranted) else event.lease_id) != lease_id
        )
        place = self._held.pop(lease_id, None)
        if place is None or place.lease is None:
            return  # its machine already went down
        now_s = self._clock.now()
        if now_s - place.lease.start_s >= self._back_off.settled_s:
            place.failures = 0
        place.retry_s = now_s + self._back_off.after(place.failures)
        place.failures += 1
        place.lease = None
        self._woken.set()

    def avoid(self, machine: str, seconds: float) -> None:
        for index, place in self._places.items():
            if f"spot-{index}" == machine:
                place.avoided_s = self._clock.now() + seconds

    async def close(self) -> None:
        """End all leases; no further events."""
        self._next_change = None
        self._places.clear()
        self._held.clear()
        self._events.clear()

    def _catch_up(self, now_s: float) -> None:
        if now_s - self._start_s > self._end_s:
            self._end_s = math.inf
            self._at_end()
        while self._next_change is not None and self._start_s + self._next_change.time_s <= now_s + CLOCK_RESOLUTION_S:
            self._apply(self._next_change)
            self._next_change = next(self._timetable, None)
        for index in sorted(self._places):
            place = self._places[index]
            if len(self._held) >= self._wanted:
                break
            if place.offered and place.free_s <= now_s + CLOCK_RESOLUTION_S:
                self._grant(index, place, now_s)

    def _apply(self, change: Change) -> None:
        place = self._places.setdefault(change.place, _Place())
        if change.to == "up":
            place.up, place.noticed, place.retry_s, place.failures = True, False, -math.inf, 0
        elif change.to == "noticed":
            place.noticed = True
            if place.lease is not None:
                deadline_s = self._start_s + change.deadline_s
                cause = "the provider will take the machine"
                self._events.append(LeaseNoticed(lease_id=place.lease.lease_id, deadline_s=deadline_s, cause=cause))
        else:
            place.up = False
            if place.lease is not None:
                cause = f"the provider took the machine {'after' if place.noticed else 'without'} notice"
                self._events.append(LeaseEnded(lease_id=place.lease.lease_id, cause=cause))
                del self._held[place.lease.lease_id]
                place.lease = None

    def _grant(self, index: int, place: _Place, now_s: float) -> None:
        self._granted += 1
        place.lease = Lease(
            lease_id=f"lease-{self._session}-{self._granted}",
            worker_id=f"spot-{index}",
            kind="preemptible",
            price_usd_per_hour=self._price,
            start_s=now_s,
        )
        self._held[place.lease.lease_id] = place
        self._events.append(LeaseGranted(lease=place.lease))
