"""The workers there are: who joins, who leaves, and what each is told.

```
 provider ──granted──▶ start ──▶ load ──▶ serve ⇄ orders ──▶ (noticed: hand back) ──▶ end
                      (host)   (pull,      │
                               probe)      └──reports, ends──▶ mailbox of whoever collects
```
Each worker has a task of its own, so that a slow, hanging or dying one delays nobody. The trainer's own engine is a
member like the others but for two things: its weights are the trainer's own, and its failure is the run's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from tidemill.config.pool import FleetConfig
from tidemill.controller import router as per_sample
from tidemill.controller.estimates import LengthEstimator, ThroughputProfile
from tidemill.controller.fleet_events import FleetEventLog
from tidemill.controller.in_flight import LOCAL
from tidemill.controller.publishing import LogprobsMissing, Publishing, Quarantined
from tidemill.controller.router import Router
from tidemill.controller.waiting import LeaseOutcome, Mailbox, Timeouts, Wait, wait_with_deadline
from tidemill.controller.worker_state import SERVING, DecodeRate, WorkerCommand, WorkerPhase, WorkerState
from tidemill.core.errors import DeadlineError, WorkerLost
from tidemill.core.protocols import Clock, Provider, Publisher, Telemetry, Worker, WorkerHost
from tidemill.core.records import (
    ITEM_BYTES,
    FleetRow,
    GenerateRequest,
    Lease,
    LeaseEnded,
    LeaseEvent,
    LeaseGranted,
    LeaseNoticed,
    SampleId,
    WorkerReport,
)
from tidemill.telemetry.events import JOIN, span

RECEIVE_S = 10.0
"""How long one `next_report` or `next_event` waits; only a rhythm, deadlines are those of `Patience` and `[fleet]`."""


class Fleet:
    """Use as an async context manager: everything it starts ends with it. The local worker stays open.

    Args:
        local: the trainer's own engine.
        slots: samples a worker decodes at once.
        local_slots: the same of the local one, where it is another kind of machine.
        provider: where preemptible workers come from; None for none, and then `host` and `publisher` are not needed.
        host: starts them.
        publisher: gives them weights.
        needs_logprobs: settings that need the logprobs of sampled tokens; an engine that returns none then ends the
            run before it generates anything.
        heartbeat_timeout_s: overrides the configured value; infinite where workers share the trainer's thread, and so
            cannot send heartbeats while it computes.
        router: who decides which worker takes which sample.
        lengths: what it is told of samples' lengths.
    """

    def __init__(
        self,
        local: Worker | None,
        *,
        slots: int,
        local_slots: int | None = None,
        clock: Clock,
        telemetry: Telemetry,
        config: FleetConfig | None = None,
        timeouts: Timeouts | None = None,
        provider: Provider | None = None,
        host: WorkerHost | None = None,
        publisher: Publisher | None = None,
        needs_logprobs: Sequence[str] = (),
        heartbeat_timeout_s: float | None = None,
        router: Router = per_sample,
        lengths: LengthEstimator | None = None,
    ) -> None:
        self.slots, self.clock, self.config = slots, clock, config or FleetConfig()
        self.router, self.lengths, self.profile = router, lengths or LengthEstimator(), ThroughputProfile()
        self.event_log = FleetEventLog(telemetry, clock)
        self._telemetry, self._timeouts = telemetry, timeouts or Timeouts()
        self._provider, self._host = provider, host
        self._silence_s = self.config.heartbeat_timeout_s if heartbeat_timeout_s is None else heartbeat_timeout_s
        self._members: dict[str, WorkerState] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._mailbox: Mailbox | None = None
        self._pace: DecodeRate | None = None  # of the last tick that any worker told of
        self._failure: Exception | None = None
        self.publishing = Publishing(
            publisher,
            self._members,
            needs_logprobs=needs_logprobs,
            event_log=self.event_log,
            clock=clock,
            telemetry=telemetry,
            timeouts=self._timeouts,
            news=self._ring,
        )
        self.local: WorkerState | None = None
        if local is not None:
            lease = Lease(
                lease_id=LOCAL,
                worker_id=LOCAL,
                kind="reserved",
                price_usd_per_hour=self.config.reserved_usd_per_hour,
                start_s=0.0,
            )
            self.local = WorkerState(lease=lease, slots=slots if local_slots is None else local_slots, worker=local)

    @property
    def elastic(self) -> bool:
        """Whether preemptible workers may come at all."""
        return self._provider is not None

    async def __aenter__(self) -> Self:
        if self.local is not None:
            self.local.lease = msgspec.structs.replace(self.local.lease, start_s=self.clock.now())
            self.local.state = WorkerPhase.SERVING
            self._enter(self.local, self._run_local(self.local))
        if self._provider is not None:
            self._spawn(self._follow(self._provider), "leases")
            self._spawn(self._listen_for_silence(), "silence")
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in list(self._members.values()):
            self._leave(member)
            self.event_log.lease_ended(member, "the run ended", evicted=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What the task that owns a batch asks for.

    @contextmanager
    def delivering_to(self, mailbox: Mailbox) -> Iterator[None]:
        """Reports and ends of leases go to this mailbox; without one they are of no interest to anybody.

        One within another: the outer one gets nothing meanwhile, and must have nothing in flight.
        """
        outer, self._mailbox = self._mailbox, mailbox
        if self._failure is not None:
            mailbox.put_failure(self._failure)
        try:
            yield
        finally:
            self._mailbox = outer
            for ended in mailbox.mail.ended:  # as the last sample came; what it had is of no more interest
                self.event_log.ended(ended, [])

    def __getitem__(self, lease_id: str) -> WorkerState:
        return self._members[lease_id]

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._members

    def serving(self, version_number: int) -> list[WorkerState]:
        """Preemptible workers that take samples of a version now."""
        return [
            member
            for member in self._members.values()
            if member.state is SERVING
            and member is not self.local
            and member.version is not None
            and member.version.number == version_number
        ]

    @property
    def reserved_engines(self) -> int:
        """Engines of a preemptible worker's size that the local worker amounts to; at least 1."""
        return max(1, round(self.local.slots / self.slots)) if self.local is not None else 1

    @property
    def joined(self) -> int:
        """Preemptible workers that take samples, now or when they have pulled the newest weights."""
        return sum(member.state is SERVING and member is not self.local for member in self._members.values())

    @property
    def preemptible(self) -> int:
        """Preemptible workers held, in whatever state."""
        return len(self._members) - (LOCAL in self._members)

    def submit(self, lease_id: str, requests: Sequence[GenerateRequest], *, step: int) -> None:
        """Give samples to a worker; never waits."""
        member = self._members[lease_id]
        self.event_log.busy(member, len(requests), step=step, purpose=requests[0].sample_id.purpose)
        self._order(member, WorkerCommand(lambda worker: worker.submit(requests), "take samples"))

    def abort(self, lease_id: str, sample_ids: Sequence[SampleId]) -> None:
        """Ask a worker for samples back; never waits. Harmless when the worker has left."""
        if sample_ids and (member := self._members.get(lease_id)) is not None:
            self._order(member, WorkerCommand(lambda worker: worker.abort(sample_ids), "hand samples back"))

    def dismiss(self, lease_id: str, cause: str) -> bool:
        """A preemptible worker is of no use: its lease ends. Says whether it was there; the reserved one stays."""
        member = self._members.get(lease_id)
        if member is None or not member.preemptible:
            return False
        self._end(member, cause)
        return True

    def note_idle(self, lease_id: str) -> None:
        """A worker has none of the samples in flight."""
        member = self._members[lease_id]
        self.event_log.idle(member)
        if member.behind:
            self.publishing.let_load(member)

    def rows(self) -> list[FleetRow]:
        now_s = self.clock.now()
        return [member.row(now_s) for member in self._members.values()]

    def idle_s(self) -> float:
        """How long the preemptible workers have had nothing to do, on average; 0 without any."""
        now_s = self.clock.now()
        idle = [
            0.0 if member.busy_since_s is not None else now_s - member.idle_since_s
            for member in self._members.values()
            if member.preemptible and member.state is WorkerPhase.SERVING
        ]
        return sum(idle) / len(idle) if idle else 0.0

    def want(self, workers: int) -> None:
        if self._provider is not None:
            self._provider.want(workers)

    # A worker's life.

    async def _follow(self, provider: Provider) -> None:
        try:
            while True:
                event = await provider.next_event(RECEIVE_S)
                if event is not None:
                    self._take(event)
        except Exception as error:  # noqa: BLE001 - whoever collects raises it
            self._fail(error)

    def _take(self, event: LeaseEvent) -> None:
        if isinstance(event, LeaseGranted):
            if self.event_log.knows(event.lease.lease_id):
                return  # said twice
            member = WorkerState(
                lease=event.lease, slots=self.slots, heard_s=self.clock.now(), idle_since_s=self.clock.now()
            )
            self.event_log.granted(member)
            self._enter(member, self._live(member))
        elif (member_ := self._members.get(event.lease_id)) is None:
            return  # it ended before its provider knew
        elif isinstance(event, LeaseNoticed):
            self._notice(member_, event.deadline_s, event.cause or "its provider takes it back")
        elif isinstance(event, LeaseEnded):
            self._end(member_, event.cause, provider_knows=True)

    def _enter(self, member: WorkerState, life: Coroutine[Any, Any, None]) -> None:
        self._members[member.lease.lease_id] = member
        member.task = self._spawn(life, f"worker {member.lease.lease_id}")

    async def _live(self, member: WorkerState) -> None:
        try:
            try:
                async with asyncio.timeout(self.config.join_timeout_s):
                    await self._join(member)
            except TimeoutError as error:
                raise WorkerLost(
                    f"it was not generating {self.config.join_timeout_s:.0f} s after its lease began"
                ) from error
            await self._serve(member)
        except (WorkerLost, DeadlineError) as error:
            self._end(member, str(error), evicted=not isinstance(error, Quarantined))
        except LogprobsMissing as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a fault of one worker is not the fleet's
            self._end(member, f"it failed: {error!r}", evicted=False, crashed=True)

    async def _join(self, member: WorkerState) -> None:
        assert self._host is not None, "leases but no host to start workers on"
        with span(self._telemetry, self.clock, JOIN, lease=member.lease.lease_id, worker=member.lease.worker_id):
            member.worker = await self._host.start(member.lease)
            member.state = WorkerPhase.LOADING
            await self.publishing.catch_up(member, member.worker)
            member.state = WorkerPhase.LEAVING if member.noticed else WorkerPhase.SERVING
            member.heard_s = self.clock.now()

    async def _serve(self, member: WorkerState) -> None:
        """Receive and obey until one of them fails."""
        jobs = {asyncio.ensure_future(self._receive(member)), asyncio.ensure_future(self._obey(member))}
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _run_local(self, member: WorkerState) -> None:
        try:
            await self._serve(member)
        except Exception as error:  # noqa: BLE001 - whoever collects raises it
            self._fail(error)

    async def _receive(self, member: WorkerState) -> None:
        worker = member.worker
        assert worker is not None, f"{member.lease.lease_id} was not started"
        while True:
            report = await worker.next_report(min(RECEIVE_S, self._silence_s))
            if report is None:
                continue
            tokens = _tokens(report, member.lease.lease_id)
            member.heard_s, member.status = self.clock.now(), report.status
            member.heard_tokens = tokens
            member.tokens += tokens
            member.busy_tokens += tokens
            member.work.observe(report.status.work)
            if (running := report.status.running) and tokens and member.slots == self.slots:  # machines of one kind
                self.profile.observe(running, report.status.tokens_per_s)
                self._pace = DecodeRate(report.status.tokens_per_s / running, tokens / running)
            if report.notice_s is not None:
                self._notice(member, member.heard_s + report.notice_s, "the worker was told")
            if self._mailbox is not None:
                self._mailbox.put_reports([report])

    async def _obey(self, member: WorkerState) -> None:
        while True:
            order = await member.orders.get()
            assert member.worker is not None, f"{member.lease.lease_id} was not started"
            name = "the worker" if member is self.local else f"worker {member.lease.worker_id}"
            wait = Wait(
                awaited=f"{name} to {order.what}",
                look_at="the worker and its engine",
                deadline_s=self._timeouts.load_s,
            )
            await wait_with_deadline(
                order.call(member.worker),
                wait,
                notice_s=self._timeouts.notice_s,
                telemetry=self._telemetry,
                clock=self.clock,
            )

    def _notice(self, member: WorkerState, deadline_s: float, cause: str) -> None:
        """The machine goes at `deadline_s`: take no more samples, and hand back what is left shortly before."""
        if member.noticed:
            return
        member.noticed = True
        if member.state is WorkerPhase.SERVING:
            member.state = WorkerPhase.LEAVING
        self.event_log.noticed(member, deadline_s - self.clock.now(), cause)
        self._spawn(self._hand_back(member, deadline_s - self.config.drain_margin_s), f"notice {member.lease.lease_id}")

    async def _hand_back(self, member: WorkerState, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.clock.now()))
        if member.state is not WorkerPhase.GONE and self._mailbox is not None:
            self._mailbox.mail.hand_back.append(member.lease.lease_id)
            self._mailbox.ring()

    def _end(
        self,
        member: WorkerState,
        cause: str,
        *,
        provider_knows: bool = False,
        evicted: bool = True,
        crashed: bool = False,
    ) -> None:
        """A lease is over, for whatever reason: its samples go on elsewhere. The second call does nothing."""
        if member.state is WorkerPhase.GONE:
            return
        joined, now_s = member.state in (WorkerPhase.SERVING, WorkerPhase.LEAVING), self.clock.now()
        lost = member.tokens_since(now_s, usual=self._pace)
        self._leave(member)
        if self._provider is not None and not provider_knows:
            self._spawn(self._provider.release(member.lease.lease_id), f"release {member.lease.lease_id}")
        if joined:
            ended = LeaseOutcome(
                lease_id=member.lease.lease_id,
                worker_id=member.lease.worker_id,
                cause=cause,
                noticed=member.noticed,
                crashed=crashed,
                evicted=evicted,
                tokens_lost=lost,
            )
            if self._mailbox is not None:
                self._mailbox.mail.ended.append(ended)
                self._ring()
            else:
                self.event_log.ended(ended, [])
        elif evicted or crashed:
            self.event_log.join_failed(member, cause)
        self.event_log.lease_ended(member, cause, evicted=joined and evicted)

    def _leave(self, member: WorkerState) -> None:
        self.event_log.idle(member)
        member.state = WorkerPhase.GONE
        del self._members[member.lease.lease_id]
        if member.task is not None and member.task is not asyncio.current_task():
            member.task.cancel()
        if member.worker is not None and member is not self.local:
            member.worker.kill()

    async def _listen_for_silence(self) -> None:
        """Judged only when this task itself came on time: after a busy stretch the reports are read first."""
        every_s = self._silence_s / 4
        while self._silence_s < float("inf"):
            due_s = self.clock.now() + every_s
            await asyncio.sleep(every_s)
            if self.clock.now() - due_s > every_s:
                continue
            for member in list(self._members.values()):
                silent_s = self.clock.now() - member.heard_s
                joined = member.state in (WorkerPhase.SERVING, WorkerPhase.LEAVING)
                if member.preemptible and joined and silent_s > self._silence_s:
                    self._end(member, f"it was silent for {silent_s:.1f} s")

    # Small things.

    def _order(self, member: WorkerState, order: WorkerCommand) -> None:
        member.orders.put_nowait(order)

    def _ring(self) -> None:
        if self._mailbox is not None:
            self._mailbox.ring()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if self._mailbox is not None:
            self._mailbox.put_failure(error)

    def _spawn(self, job: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(job, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _tokens(report: WorkerReport, lease_id: str) -> int:
    """New tokens in a report.

    Raises:
        WorkerLost: it holds what another lease should say.
    """
    nbytes = 0
    for delta in report.deltas:  # a loop, because with many workers this is much of what the controller does
        if delta.lease_id != lease_id:
            raise WorkerLost("it speaks for another lease")
        nbytes += len(delta.token_ids)
    return nbytes // ITEM_BYTES
