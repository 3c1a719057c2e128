"""Waiting with a voice: a note every while, and a deadline that says what was awaited and where to look."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from tidemill.core.clock import Clock
from tidemill.core.errors import DeadlineError
from tidemill.core.protocols import Telemetry
from tidemill.core.records import Record

T = TypeVar("T")

CLOCK_RESOLUTION_S = 1e-6


class Patience(Record):
    """How long the controller waits, in seconds, before it says so and before it gives up."""

    notice_s: float = 30.0  # a "waiting" event this often
    worker_s: float = 600.0  # without any message while samples are in flight
    pool_s: float = 86400.0  # while there is nobody to generate: machines that went may come back
    scorer_s: float = 600.0  # without any reward while samples are being scored
    trainer_s: float = 7200.0  # one accumulate or commit
    stop_s: float = 30.0  # for the last tokens of samples called back
    load_s: float = 600.0  # a worker taking new weights, samples or an abort
    checkpoint_s: float = 3600.0  # writing or reading one


class Wait(Record):
    """What is awaited, for how long at most, and where to look if it does not come."""

    awaited: str
    look_at: str
    deadline_s: float


async def patiently(awaitable: Awaitable[T], wait: Wait, *, notice_s: float, telemetry: Telemetry, clock: Clock) -> T:
    """Await, with a "waiting" event every `notice_s` seconds.

    Raises:
        DeadlineError: `wait.deadline_s` seconds passed.
    """
    task = asyncio.ensure_future(awaitable)
    since = clock.now()
    try:
        while True:
            left_s = since + wait.deadline_s - clock.now()
            done, _ = await asyncio.wait({task}, timeout=max(0.0, min(notice_s, left_s)))
            if done:
                return task.result()
            still_waiting(wait, waited_s=clock.now() - since, telemetry=telemetry)
    finally:
        task.cancel()


def still_waiting(wait: Wait, *, waited_s: float, telemetry: Telemetry) -> None:
    """Say that the wait goes on, or end it.

    Raises:
        DeadlineError: it has lasted `wait.deadline_s` seconds.
    """
    if waited_s >= wait.deadline_s - CLOCK_RESOLUTION_S:
        raise DeadlineError(wait.awaited, waited_s=waited_s, look_at=wait.look_at)
    telemetry.event("waiting", awaited=wait.awaited, waited_s=round(waited_s, 1), deadline_s=wait.deadline_s)
