"""What turns requests into scored samples: the parts that every batch shares."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import Tally
from tidemill.controller.ledger import Ledger
from tidemill.controller.reading import Reading
from tidemill.controller.waiting import Patience, Wait, patiently
from tidemill.core.clock import Clock
from tidemill.core.protocols import Codec, Scorer, Telemetry
from tidemill.core.records import WorkerReport, WorkerStatus
from tidemill.telemetry.events import GIVEN_UP
from tidemill.telemetry.spans import span

T = TypeVar("T")


class StopRequested(Exception):
    """The user asked the run to stop; what was collected is journalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Who generates, who judges, and where it is noted."""

    fleet: Fleet
    ledger: Ledger
    scorer: Scorer
    codec: Codec
    telemetry: Telemetry
    clock: Clock
    stop: asyncio.Event  # set by whoever wants the run to end
    patience: Patience = field(default_factory=Patience)
    truncated: Literal["trained", "masked"] = "trained"  # what a completion cut by the token limit counts
    phase: str = "rollout"
    window_s: float = math.inf  # how long the reserved side generates beside preemptible workers
    reading: Reading | None = None  # None where no model reads samples one by one
    newest: dict[str, WorkerStatus] = field(default_factory=dict)  # what each said last, by lease: engines count anew

    async def patiently(self, call: Coroutine[Any, Any, T], *, awaited: str, look_at: str, deadline_s: float) -> T:
        """Await with "waiting" events and a deadline.

        Raises:
            DeadlineError: it took longer than `deadline_s` seconds.
        """
        wait = Wait(awaited=awaited, look_at=look_at, deadline_s=deadline_s)
        return await patiently(call, wait, notice_s=self.patience.notice_s, telemetry=self.telemetry, clock=self.clock)

    async def unless_stopped(self, call: Coroutine[Any, Any, T], *, awaited: str, lost: str) -> T:
        """Await; from when the run is to end on, for `patience.stop_s` seconds at most.

        Args:
            lost: what is, when that is over; told with the event.

        Raises:
            StopRequested: it is over, and `call` was cancelled.
        """
        task, stop = asyncio.ensure_future(call), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=self.patience.stop_s)
            if not task.done():
                self.telemetry.event(GIVEN_UP, awaited=awaited, waited_s=self.patience.stop_s, lost=lost)
                raise StopRequested
            return task.result()
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """An event with a duration; a block left by `StopRequested` is told as interrupted, not as failed."""
        stopped: StopRequested | None = None
        with span(self.telemetry, self.clock, name, **fields) as told:
            try:
                yield told
            except StopRequested as request:
                told["interrupted"], stopped = True, request
        if stopped is not None:
            raise stopped

    def note_status(self, report: WorkerReport, tally: Tally) -> None:
        """Remember what a worker is doing; count the prompt tokens it computed since it last spoke."""
        status = report.status
        before = self.newest.get(report.lease_id)
        tally.prompt_tokens_computed += status.prompt_tokens_computed - (before.prompt_tokens_computed if before else 0)
        tally.prompt_tokens_reused += status.prompt_tokens_reused - (before.prompt_tokens_reused if before else 0)
        self.newest[report.lease_id] = status
