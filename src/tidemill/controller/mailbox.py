"""What arrives for the task that reads letters: many write, one reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tidemill.controller.samples import Sample
from tidemill.core.buffers import LogprobBuffer
from tidemill.core.records import Record, Reward, WorkerReport


class Ended(Record):
    """A lease is over; its samples must go on elsewhere."""

    lease_id: str
    worker_id: str
    cause: str
    noticed: bool = False
    evicted: bool = True  # the machine was taken, rather than given back
    crashed: bool = False  # the worker raised rather than vanished: a sample of its may be the reason
    tokens_lost: int = 0  # estimated: made since its last report


@dataclass(slots=True)
class Mail:
    """What the mailbox held, by kind. Reports come before the ends of leases: what was said before counts."""

    reports: list[WorkerReport] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
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
        self.mail = Mail()
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

    async def take(self, timeout_s: float) -> Mail:
        """Everything that has arrived, after waiting at most so long for something."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 loses a cancellation that meets a ring
                await self._rung.wait()
        self._rung.clear()
        mail, self.mail = self.mail, Mail()
        return mail
