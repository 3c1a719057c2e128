"""Records a provider's events in virtual time and checks every lease."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from tests.virtual_time import run_virtual
from tidemill.core.protocols import LoopClock, Provider
from tidemill.core.records import LeaseEnded, LeaseEvent, LeaseGranted, LeaseNoticed
from tidemill.pool.provider import CLOCK_RESOLUTION_S, BackOff, ScheduledProvider, Timetable


def scheduled(
    timetable: Timetable, *, session: int = 1, most: float = math.inf, back_off: BackOff | None = None
) -> ScheduledProvider:
    return ScheduledProvider(
        timetable, clock=LoopClock(), session=session, price_usd_per_hour=2.0, most=most, back_off=back_off
    )


@dataclass
class Story:
    """Events with their times; `held` are the current leases with their workers."""

    told: list[tuple[float, LeaseEvent]] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)

    def hear(self, time_s: float, event: LeaseEvent) -> None:
        self.told.append((time_s, event))
        if isinstance(event, LeaseGranted):
            assert event.lease.lease_id not in self.granted_before(), "a lease id was used twice"
            assert event.lease.worker_id not in self.held.values(), "one worker has two leases"
            self.held[event.lease.lease_id] = event.lease.worker_id
        else:
            assert event.lease_id in self.held, "an event of a lease that is not held"
            if isinstance(event, LeaseEnded):
                del self.held[event.lease_id]

    def granted_before(self) -> list[str]:
        return [event.lease.lease_id for _, event in self.told[:-1] if isinstance(event, LeaseGranted)]

    @property
    def granted(self) -> list[tuple[float, str]]:
        """(time, worker)"""
        return [(time_s, event.lease.worker_id) for time_s, event in self.told if isinstance(event, LeaseGranted)]

    @property
    def noticed(self) -> list[tuple[float, LeaseNoticed]]:
        return [(time_s, event) for time_s, event in self.told if isinstance(event, LeaseNoticed)]

    @property
    def ended(self) -> list[tuple[float, LeaseEnded]]:
        return [(time_s, event) for time_s, event in self.told if isinstance(event, LeaseEnded)]


async def listen(provider: Provider, story: Story, until_s: float) -> Story:
    """Record all events of the provider up to and including the loop's time `until_s`."""
    loop = asyncio.get_running_loop()
    while True:
        left_s = until_s - loop.time()
        event = await provider.next_event(max(0.0, left_s))
        if event is not None:
            story.hear(loop.time(), event)
        elif left_s <= CLOCK_RESOLUTION_S:
            return story


def whole_story(
    timetable: Timetable, until_s: float, *, session: int = 1, want: int | None = None, most: float = math.inf
) -> Story:
    """Record from second 0 on, releasing nothing."""

    async def run() -> Story:
        provider = scheduled(timetable, session=session, most=most)
        if want is not None:
            provider.request_workers(want)
        return await listen(provider, Story(), until_s)

    return run_virtual(run())
