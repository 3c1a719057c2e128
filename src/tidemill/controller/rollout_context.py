"""What generating and scoring samples needs, with waits that have deadlines and end when the run is to stop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tidemill.controller.fleet import Fleet
from tidemill.controller.frozen_scoring import FrozenScoring
from tidemill.controller.in_flight import StepCounters
from tidemill.controller.ledger import Ledger
from tidemill.controller.samples import TokenObserver
from tidemill.controller.turns import AgentLimits
from tidemill.controller.waiting import Timeouts, Wait, wait_with_deadline
from tidemill.core.protocols import Clock, Codec, Environments, Scorer, Telemetry
from tidemill.core.records import WorkerReport, WorkerStatus
from tidemill.telemetry.events import WAIT_ABANDONED, span

T = TypeVar("T")


class StopRequested(Exception):
    """The user asked the run to stop; samples received so far are journalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Everything that generating and scoring samples needs."""

    fleet: Fleet
    ledger: Ledger
    scorer: Scorer
    codec: Codec
    telemetry: Telemetry
    clock: Clock
    stop: asyncio.Event  # set to end the run
    timeouts: Timeouts = field(default_factory=Timeouts)
    truncated: Literal["trained", "masked"] = "trained"  # treatment of completions cut by the token limit
    phase: str = "rollout"
    window_s: float = math.inf  # how long the local worker generates while preemptible workers serve
    gives_up: bool = True  # end the run if machines live shorter than a recomputation; else samples wait for others
    frozen_scoring: FrozenScoring | None = None  # None without models that score samples one by one
    observers: tuple[TokenObserver, ...] = ()  # besides `frozen_scoring`
    environments: Environments | None = None  # None: samples are single completions
    agent: AgentLimits | None = None
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)  # the latest, by lease

    @property
    def all_observers(self) -> tuple[TokenObserver, ...]:
        return self.observers if self.frozen_scoring is None else (self.frozen_scoring, *self.observers)

    async def wait_for(self, call: Coroutine[Any, Any, T], *, awaited: str, look_at: str, deadline_s: float) -> T:
        """Await with "waiting" events. Raises DeadlineError: it took longer than `deadline_s` seconds."""
        wait = Wait(awaited=awaited, look_at=look_at, deadline_s=deadline_s)
        return await wait_with_deadline(
            call, wait, notice_s=self.timeouts.notice_s, telemetry=self.telemetry, clock=self.clock
        )

    async def unless_stopped(self, call: Coroutine[Any, Any, T], *, awaited: str, lost: str) -> T:
        """Await; once the run is to stop, for at most `timeouts.stop_s` more seconds.

        Args:
            lost: what a timeout costs, for the event.

        Raises:
            StopRequested: the time is up, and `call` was cancelled.
        """
        task, stop = asyncio.ensure_future(call), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=self.timeouts.stop_s)
            if not task.done():
                self.telemetry.event(WAIT_ABANDONED, awaited=awaited, waited_s=self.timeouts.stop_s, lost=lost)
                raise StopRequested
            return task.result()
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """An event with a duration; `StopRequested` marks it as interrupted, not as failed."""
        stopped: StopRequested | None = None
        with span(self.telemetry, self.clock, name, **fields) as all_fields:
            try:
                yield all_fields
            except StopRequested as request:
                all_fields["interrupted"], stopped = True, request
        if stopped is not None:
            raise stopped

    def update_status(self, report: WorkerReport, counters: StepCounters) -> None:
        """Store a worker's status, and count the prompt tokens since its last report."""
        status = report.status
        before = self.statuses.get(report.lease_id)
        counters.prompt_tokens_computed += status.prompt_tokens_computed - (
            before.prompt_tokens_computed if before else 0
        )
        counters.prompt_tokens_reused += status.prompt_tokens_reused - (before.prompt_tokens_reused if before else 0)
        self.statuses[report.lease_id] = status
