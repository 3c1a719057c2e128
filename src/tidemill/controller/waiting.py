"""Waiting with deadlines and log lines, and the mailbox from many writers to one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from tidemill.controller.samples import Sample
from tidemill.core.errors import DeadlineError
from tidemill.core.protocols import Clock, Telemetry
from tidemill.core.records import LogprobBuffer, Record, Reward, WorkerReport

T = TypeVar("T")

CLOCK_RESOLUTION_S = 1e-6


class Timeouts(Record):
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


async def wait_with_deadline(
    awaitable: Awaitable[T], wait: Wait, *, notice_s: float, telemetry: Telemetry, clock: Clock
) -> T:
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


class LeaseOutcome(Record):
    """A lease is over; its samples must go on elsewhere."""

    lease_id: str
    worker_id: str
    cause: str
    noticed: bool = False
    evicted: bool = True  # the machine was taken, rather than given back
    crashed: bool = False  # the worker raised rather than vanished: a sample of its may be the reason
    tokens_lost: int = 0  # estimated: made since its last report


@dataclass(slots=True)
class Messages:
    """What the mailbox held, by kind. Reports come before the ends of leases: what was said before counts."""

    reports: list[WorkerReport] = field(default_factory=list)
    ended: list[LeaseOutcome] = field(default_factory=list)
    hand_back: list[str] = field(default_factory=list)  # leases about to end
    # With the attempt that was judged, and the reference's logprobs where it was asked.
    rewards: list[tuple[Sample, int, Reward, LogprobBuffer]] = field(default_factory=list)
    reread: list[tuple[Sample, int, LogprobBuffer]] = field(default_factory=list)  # of samples rewarded before
    failures: list[Exception] = field(default_factory=list)
    stop: bool = False

    @property
    def news(self) -> bool:
        """Whether anything but reports came: what those are worth is seen when they are applied."""
        return bool(self.rewards or self.reread or self.failures or self.stop or self.ended or self.hand_back)


class Mailbox:
    """Letters of one collection. `mail` is written to directly; `ring` says so."""

    def __init__(self) -> None:
        self.mail = Messages()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Something was written, or happened, that the reader should look at."""
        self._rung.set()

    def put_reports(self, reports: Sequence[WorkerReport]) -> None:
        self.mail.reports += reports
        self.ring()

    def put_failure(self, error: Exception) -> None:
        self.mail.failures.append(error)
        self.ring()

    async def take(self, timeout_s: float) -> Messages:
        """Everything that has arrived, after waiting at most so long for something."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 loses a cancellation that meets a ring
                await self._rung.wait()
        self._rung.clear()
        mail, self.mail = self.mail, Messages()
        return mail
