"""Waits with deadlines and log lines, and the mailbox in which the collector receives messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from tidemill.controller.samples import Sample
from tidemill.core.errors import DeadlineError
from tidemill.core.protocols import Clock, Telemetry
from tidemill.core.records import LogprobBuffer, Observation, Record, Reward, WorkerReport

T = TypeVar("T")

CLOCK_RESOLUTION_S = 1e-6


class Timeouts(Record):
    """Deadlines of the controller's waits, in seconds."""

    notice_s: float = 30.0  # interval of "waiting" events
    worker_s: float = 600.0  # without new tokens while samples are running
    pool_s: float = 86400.0  # without a worker: evicted machines may come back
    scorer_s: float = 600.0  # without a reward while samples are being scored
    act_s: float = 7200.0  # without an answer while environments work; they have shorter deadlines themselves
    trainer_s: float = 7200.0  # one accumulate or commit
    stop_s: float = 30.0  # for the last tokens of aborted samples when the run stops
    load_s: float = 600.0  # a worker loading weights, accepting samples or aborting them
    checkpoint_s: float = 3600.0  # writing or reading one


class Wait(Record):
    """Description of a wait, for its events and its error."""

    awaited: str
    look_at: str
    deadline_s: float


async def wait_with_deadline(
    awaitable: Awaitable[T], wait: Wait, *, notice_s: float, telemetry: Telemetry, clock: Clock
) -> T:
    """Await, and log a "waiting" event every `notice_s` seconds.

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
            log_waiting(wait, waited_s=clock.now() - since, telemetry=telemetry)
    finally:
        task.cancel()


def log_waiting(wait: Wait, *, waited_s: float, telemetry: Telemetry) -> None:
    """Log a "waiting" event, or fail at the deadline.

    Raises:
        DeadlineError: the wait has lasted `wait.deadline_s` seconds.
    """
    if waited_s >= wait.deadline_s - CLOCK_RESOLUTION_S:
        raise DeadlineError(wait.awaited, waited_s=waited_s, look_at=wait.look_at)
    telemetry.event("waiting", awaited=wait.awaited, waited_s=round(waited_s, 1), deadline_s=wait.deadline_s)


class LeaseOutcome(Record):
    """A lease has ended; its samples must continue on other workers."""

    lease_id: str
    worker_id: str
    cause: str
    noticed: bool = False
    evicted: bool = True  # the machine was lost, not given back
    died: bool = False  # its process ended or hangs, while the provider had not taken the machine
    crashed: bool = False  # the worker raised an error, possibly because of one of its samples
    tokens_lost: int = 0  # estimate of the tokens generated after its last report
    executing: int = 0  # samples that were not in its queue


@dataclass(slots=True)
class Messages:
    """Content of the mailbox, by kind. Reports are applied before the lease outcomes that arrived with them."""

    reports: list[WorkerReport] = field(default_factory=list)
    ended: list[LeaseOutcome] = field(default_factory=list)
    draining: list[str] = field(default_factory=list)  # leases about to end
    observations: list[tuple[Sample, int, Observation]] = field(default_factory=list)  # with the attempt answered
    # With the attempt that was scored, and its reference logprobs (empty without a separate reference).
    rewards: list[tuple[Sample, int, Reward, LogprobBuffer]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    tainted: bool = False  # a worker computed wrongly; see `Fleet.tainted`
    stop: bool = False

    @property
    def progress(self) -> bool:
        """Whether there is anything but reports, which count as progress only if they have new tokens."""
        other_kinds = (self.rewards, self.observations, self.failures, self.ended, self.draining)
        return self.stop or any(other_kinds)


class Mailbox:
    """Messages to one collector. Writers that fill `messages` directly call `notify`."""

    def __init__(self) -> None:
        self.messages = Messages()
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Wake the reader."""
        self._notified.set()

    def put_reports(self, reports: Sequence[WorkerReport]) -> None:
        self.messages.reports += reports
        self.notify()

    def put_failure(self, error: Exception) -> None:
        self.messages.failures.append(error)
        self.notify()

    async def take(self, timeout_s: float) -> Messages:
        """All messages, after waiting at most `timeout_s` seconds for the first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 can lose a cancellation
                await self._notified.wait()
        self._notified.clear()
        messages, self.messages = self.messages, Messages()
        return messages
