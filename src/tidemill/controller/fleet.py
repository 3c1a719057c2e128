"""The workers: starting them on leases, sending them commands, and removing them when their leases end.

```
 provider ──granted──▶ start ──▶ load ──▶ serve ⇄ commands ──▶ (noticed: drain) ──▶ end
                      (host)   (pull,      │
                               probe)      └──reports, lease outcomes──▶ mailbox of the collector
```
Each worker has its own task, so that a slow or hanging worker does not delay the others. The trainer's own engine
is the *local* worker. It differs in two points: its weights are the trainer's parameters, and its failure ends the run.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from tidemill.config.pool import FleetConfig
from tidemill.controller import router as per_sample
from tidemill.controller.estimates import ThroughputProfile
from tidemill.controller.in_flight import LOCAL
from tidemill.controller.length_model import LengthModel
from tidemill.controller.publishing import LogprobsMissing, Publishing, Quarantined
from tidemill.controller.router import Router
from tidemill.controller.waiting import LeaseOutcome, Mailbox, Timeouts
from tidemill.controller.worker_state import SERVING, DecodeRate, FleetEventLog, WorkerCommand, WorkerPhase, WorkerState
from tidemill.core.errors import DeadlineError, WorkerLost
from tidemill.core.evidence import MachineHealth
from tidemill.core.protocols import Clock, MachineGuard, Provider, Publisher, Telemetry, Worker, WorkerHost
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
    StepMetrics,
    WorkerReport,
)
from tidemill.telemetry.events import JOIN, JOIN_FAILED, NOTICE, WORKER_HEALTH, span

RECEIVE_S = 10.0
"""Timeout of one `next_report` or `next_event`; deadlines are those of `Timeouts` and `[fleet]`."""

RECENT_EVICTIONS = 16
"""Evictions from which the eviction interval is estimated."""


class Fleet:
    """An async context manager: on exit all workers but the local one are killed, and all tasks cancelled.

    Args:
        local: the trainer's own engine.
        slots: samples that a worker decodes concurrently.
        local_slots: the same for the local worker, if it differs.
        provider: source of preemptible workers; without it, `host` and `publisher` are not needed.
        host: starts preemptible workers.
        publisher: makes weights available to them.
        needs_logprobs: settings that need the logprobs of sampled tokens; an engine without them ends the run before
            it generates anything.
        heartbeat_timeout_s: overrides the configured value; infinite where workers share the trainer's thread and
            cannot send heartbeats while it computes.
        router: assigns samples to workers.
        lengths: predicts completion lengths; it observes each sample when it ends.
        machines: judges the workers; without it, only a probe after each load does.
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
        lengths: LengthModel | None = None,
        machines: MachineGuard | None = None,
    ) -> None:
        self.slots = slots
        self.clock = clock
        self.config = config or FleetConfig()
        self.router = router
        self.lengths = lengths or LengthModel()
        self.profile = ThroughputProfile()
        self.event_log = FleetEventLog(telemetry, clock)
        self._telemetry = telemetry
        self._provider, self._host = provider, host
        self._wanted = 10**9  # preemptible workers: as many as the pool has
        self._machines = machines
        self.tainted: dict[str, MachineHealth] = {}  # by lease: workers that computed wrong tokens
        self._heartbeat_timeout_s = (
            self.config.heartbeat_timeout_s if heartbeat_timeout_s is None else heartbeat_timeout_s
        )
        self._workers: dict[str, WorkerState] = {}  # by lease
        self._tasks: set[asyncio.Task[Any]] = set()
        self._mailbox: Mailbox | None = None
        self._decode_rate: DecodeRate | None = None  # latest of any worker
        self._lives_s: deque[float] = deque(maxlen=RECENT_EVICTIONS)  # time that evicted workers served
        self._failure: Exception | None = None
        self.publishing = Publishing(
            publisher=publisher,
            workers=self._workers,
            needs_logprobs=needs_logprobs,
            probe_tolerance=self.config.probe_tolerance,
            event_log=self.event_log,
            clock=clock,
            telemetry=telemetry,
            timeouts=timeouts or Timeouts(),
            on_ready=self._note_loaded,
            machines=machines,
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
            self.local = WorkerState(lease=lease, slots=slots if local_slots is None else local_slots, handle=local)

    async def __aenter__(self) -> Self:
        if self.local is not None:
            self.local.lease = msgspec.structs.replace(self.local.lease, start_s=self.clock.now())
            self.local.phase = WorkerPhase.SERVING
            self._add(self.local, self._run_local(self.local))
        if self._provider is not None:
            self._spawn(self._follow_provider(self._provider), "leases")
            self._spawn(self._watch_heartbeats(), "heartbeats")
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in list(self._workers.values()):
            self._remove(worker)
            self.event_log.lease_ended(worker, "the run ended", evicted=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # State.

    def __getitem__(self, lease_id: str) -> WorkerState:
        return self._workers[lease_id]

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._workers

    @property
    def elastic(self) -> bool:
        """Whether there is a provider of preemptible workers."""
        return self._provider is not None

    def serving(self, version_number: int | None = None) -> list[WorkerState]:
        """Preemptible workers that take samples, those that have loaded a version or all."""
        return [
            worker
            for worker in self._workers.values()
            if worker.phase is SERVING
            and worker is not self.local
            and (version_number is None or (worker.version is not None and worker.version.number == version_number))
        ]

    @property
    def reserved_engines(self) -> int:
        """Slots of the local worker in units of a preemptible worker's, rounded; at least 1."""
        return max(1, round(self.local.slots / self.slots)) if self.local is not None else 1

    @property
    def reserved_generates(self) -> bool:
        """Whether the local worker may generate training samples."""
        return self.local is not None and (self.config.seeding or not self.elastic)

    @property
    def eviction_interval_s(self) -> float:
        """Mean time for which a preemptible worker serves until it is evicted, of the last evicted workers and those
        that serve; infinite before the first eviction."""
        now_s = self.clock.now()
        serving = [worker.served_s(now_s) for worker in self._workers.values() if worker.preemptible and worker.joined]
        return (sum(self._lives_s) + sum(serving)) / len(self._lives_s) if self._lives_s else math.inf

    def tokens_left(self, worker: WorkerState) -> float:
        """Tokens of one sample that a worker generates until the known end of its lease; infinite if none is known."""
        if worker.lease.ends_s is None or self._decode_rate is None:
            return math.inf
        left_s = worker.lease.ends_s - self.config.drain_margin_s - self.clock.now()
        return max(0.0, left_s) * self._decode_rate.tokens_per_s

    @property
    def engine_count(self) -> int:
        """Workers that serve, the local one included."""
        return sum(worker.phase is SERVING for worker in self._workers.values())

    @property
    def serving_count(self) -> int:
        """Preemptible workers that serve, whichever version they have loaded."""
        return sum(worker.phase is SERVING and worker is not self.local for worker in self._workers.values())

    @property
    def preemptible_count(self) -> int:
        """Preemptible workers in any phase."""
        return len(self._workers) - (LOCAL in self._workers)

    def rows(self) -> list[FleetRow]:
        now_s = self.clock.now()
        return [worker.row(now_s) for worker in self._workers.values()]

    def mean_idle_s(self) -> float:
        """Mean time for which preemptible workers have had no samples; 0 without workers."""
        now_s = self.clock.now()
        idle = [
            0.0 if worker.busy_since_s is not None else now_s - worker.idle_since_s
            for worker in self._workers.values()
            if worker.preemptible and worker.phase is WorkerPhase.SERVING
        ]
        return sum(idle) / len(idle) if idle else 0.0

    # Commands. None of them waits.

    @contextmanager
    def delivering_to(self, mailbox: Mailbox) -> Iterator[None]:
        """Deliver reports and lease outcomes to this mailbox; without a mailbox they are discarded.

        In a nested block only the inner mailbox receives them; the outer collector must have nothing running.
        """
        outer, self._mailbox = self._mailbox, mailbox
        if self._failure is not None:
            mailbox.put_failure(self._failure)
        try:
            yield
        finally:
            self._mailbox = outer
            for outcome in mailbox.messages.ended:  # arrived with the last sample; no running samples are affected
                self.event_log.ended(outcome, [])

    def submit(self, lease_id: str, requests: Sequence[GenerateRequest], *, step: int) -> None:
        """Send samples to a worker."""
        command = WorkerCommand(lambda handle: handle.submit(requests), "take samples")
        self.call(lease_id, command, work=len(requests), step=step, purpose=requests[0].sample_id.purpose)

    def call(self, lease_id: str, command: WorkerCommand, *, work: int, step: int, purpose: str) -> None:
        """Send a worker a command that gives it work: samples, or a chunk."""
        worker = self._workers[lease_id]
        self.event_log.busy(worker, work, step=step, purpose=purpose)
        worker.commands.put_nowait(command)

    def abort(self, lease_id: str, sample_ids: Sequence[SampleId]) -> None:
        """Ask a worker to return samples. Does nothing if the worker is gone."""
        if sample_ids and (worker := self._workers.get(lease_id)) is not None:
            worker.commands.put_nowait(WorkerCommand(lambda handle: handle.abort(sample_ids), "hand samples back"))

    def end_lease(self, lease_id: str, cause: str) -> bool:
        """End a preemptible worker's lease; returns whether there was one. The local worker stays."""
        worker = self._workers.get(lease_id)
        if worker is None or not worker.preemptible:
            return False
        self._end(worker, cause)
        return True

    def note_idle(self, lease_id: str) -> None:
        """A worker has no samples any more: log it, and let it load newer weights."""
        worker = self._workers[lease_id]
        self.event_log.idle(worker)
        if worker.rejected:
            self._end(worker, worker.rejected, evicted=False)
        elif worker.load_when_idle:
            self.publishing.queue_load(worker)

    def request_workers(self, workers: int) -> None:
        self._wanted = workers
        if self._provider is not None:
            self._provider.request_workers(workers)

    def rent(self, *, more: bool) -> None:
        """Take no more machines, or as many as were requested: by default all of the pool."""
        if self._provider is not None:
            self._provider.request_workers(self._wanted if more else 0)

    def return_machines(self, cause: str) -> int:
        """End the leases of all preemptible workers, which have nothing running; returns their number."""
        returned = [worker for worker in self._workers.values() if worker.preemptible]
        for worker in returned:
            assert self._provider is not None
            self._spawn(self._provider.release(worker.lease.lease_id), f"release {worker.lease.lease_id}")
            self._end(worker, cause, provider_knows=True, evicted=False)  # one that has not joined has not failed
        return len(returned)

    def note_trained(self, metrics: StepMetrics) -> None:
        """A batch was trained on: its mismatch tells whether a worker computes otherwise than the others."""
        if self._machines is not None:
            self._machines.trained(metrics, self.clock.now())
            self._act_on_health()

    def _act_on_health(self) -> None:
        """Log what the guard of machines found, and stop using the machines that it rejects."""
        for found in self._machines.take_changes() if self._machines is not None else ():
            fields = {"machine": found.machine, "state": found.state, "cause": found.cause, "limit": found.limit}
            value = found.value if found.value < math.inf else 1e9  # JSON has neither infinity nor NaN
            self._telemetry.event(WORKER_HEALTH, lease=found.lease_id, worker=found.worker_id, value=value, **fields)
            if not found.acts:
                continue
            worker = self._workers.get(found.lease_id)
            if found.wrong:
                self.tainted[found.lease_id] = found
                if self._mailbox is not None:
                    self._mailbox.messages.tainted = True
                    self._mailbox.notify()
            if found.state == "quarantined" and self._provider is not None and found.away_s:
                self._provider.avoid(found.machine, found.away_s)
            if worker is None or not worker.preemptible:
                continue
            if found.state == "quarantined":
                self._end(worker, f"it is quarantined: {found.cause}", evicted=False)
            elif found.state == "draining" and worker.joined:
                worker.rejected = f"it is quarantined: {found.cause}"
                worker.phase = WorkerPhase.LEAVING
                self._spawn(self._drain(worker, self.clock.now()), f"drain {found.lease_id}")

    # Leases.

    async def _follow_provider(self, provider: Provider) -> None:
        try:
            while True:
                event = await provider.next_event(RECEIVE_S)
                if event is not None:
                    self._handle(event)
        except Exception as error:  # noqa: BLE001 - the collector raises it
            self._fail(error)

    def _handle(self, event: LeaseEvent) -> None:
        if isinstance(event, LeaseGranted):
            if self.event_log.has_logged(event.lease.lease_id):
                return  # a duplicate
            now_s = self.clock.now()
            worker = WorkerState(lease=event.lease, slots=self.slots, reported_s=now_s, idle_since_s=now_s)
            self.event_log.granted(worker)
            self._add(worker, self._run_worker(worker))
        elif (known := self._workers.get(event.lease_id)) is None:
            return  # ended before the provider noticed
        elif isinstance(event, LeaseNoticed):
            self._notice(known, event.deadline_s, event.cause or "the provider takes the machine back")
        elif isinstance(event, LeaseEnded):
            self._end(known, event.cause, provider_knows=True)

    def _add(self, worker: WorkerState, run: Coroutine[Any, Any, None]) -> None:
        self._workers[worker.lease.lease_id] = worker
        worker.task = self._spawn(run, f"worker {worker.lease.lease_id}")

    def _notice(self, worker: WorkerState, deadline_s: float, cause: str) -> None:
        """Stop assigning samples to a worker whose machine goes at `deadline_s`, and drain it shortly before."""
        if worker.noticed:
            return
        worker.noticed = True
        if worker.phase is WorkerPhase.SERVING:
            worker.phase = WorkerPhase.LEAVING
        self.event_log.log(NOTICE, worker, grace_s=round(deadline_s - self.clock.now(), 3), cause=cause)
        self._spawn(self._drain(worker, deadline_s - self.config.drain_margin_s), f"notice {worker.lease.lease_id}")

    async def _drain(self, worker: WorkerState, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.clock.now()))
        worker.drained_s = self.clock.now()
        if worker.phase is not WorkerPhase.GONE and self._mailbox is not None:
            self._mailbox.messages.draining.append(worker.lease.lease_id)
            self._mailbox.notify()

    def _end(
        self,
        worker: WorkerState,
        cause: str,
        *,
        provider_knows: bool = False,
        evicted: bool = True,
        crashed: bool = False,
    ) -> None:
        """End a worker's lease; its samples continue on other workers. Does nothing the second time."""
        if worker.phase is WorkerPhase.GONE:
            return
        lease, joined = worker.lease, worker.joined
        lost = worker.unreported_tokens(self.clock.now(), fleet_rate=self._decode_rate)
        if joined and evicted:
            self._lives_s.append(worker.served_s(self.clock.now()))
        self._remove(worker)
        if self._machines is not None and worker.preemptible:
            if joined:
                self._machines.ended(lease, self.clock.now())
            elif not provider_knows:
                self._machines.join_failed(lease, cause, self.clock.now())
        if self._provider is not None and not provider_knows:
            self._spawn(self._provider.release(lease.lease_id), f"release {lease.lease_id}")
        if joined:
            outcome = LeaseOutcome(
                lease_id=lease.lease_id,
                worker_id=lease.worker_id,
                cause=cause,
                noticed=worker.noticed,
                crashed=crashed,
                died=(evicted or crashed) and not (provider_knows or worker.noticed),
                evicted=evicted,
                tokens_lost=lost,
                executing=worker.executing,
            )
            if self._mailbox is not None:
                self._mailbox.messages.ended.append(outcome)
                self._mailbox.notify()
            else:
                self.event_log.ended(outcome, [])
        elif evicted or crashed:
            self.event_log.log(JOIN_FAILED, worker, cause=cause)
        self.event_log.lease_ended(worker, cause, evicted=joined and evicted)
        self._act_on_health()

    def _remove(self, worker: WorkerState) -> None:
        self.event_log.idle(worker)
        worker.phase = WorkerPhase.GONE
        del self._workers[worker.lease.lease_id]
        if worker.task is not None and worker.task is not asyncio.current_task():
            worker.task.cancel()
        if worker.handle is not None and worker is not self.local:
            worker.handle.kill()

    async def _watch_heartbeats(self) -> None:
        """End the leases of workers that do not report.

        A check is skipped when this task itself was late: after a long computation the reports are read first.
        """
        interval_s = self._heartbeat_timeout_s / 4
        while self._heartbeat_timeout_s < float("inf"):
            due_s = self.clock.now() + interval_s
            await asyncio.sleep(interval_s)
            if self.clock.now() - due_s > interval_s:
                continue
            for worker in list(self._workers.values()):
                silent_s = self.clock.now() - worker.reported_s
                if worker.preemptible and worker.joined and silent_s > self._heartbeat_timeout_s:
                    self._end(worker, f"no report for {silent_s:.1f} s")

    # One worker.

    async def _run_worker(self, worker: WorkerState) -> None:
        try:
            try:
                async with asyncio.timeout(self.config.join_timeout_s):
                    await self._join(worker)
            except TimeoutError as error:
                raise WorkerLost(f"did not join within {self.config.join_timeout_s:.0f} s of its lease") from error
            await self._serve(worker)
        except (WorkerLost, DeadlineError) as error:
            self._act_on_health()
            self._end(worker, str(error), evicted=not isinstance(error, Quarantined))
        except LogprobsMissing as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - one worker's error does not end the run
            self._end(worker, f"it failed: {error!r}", evicted=False, crashed=True)

    async def _run_local(self, worker: WorkerState) -> None:
        try:
            await self._serve(worker)
        except Exception as error:  # noqa: BLE001 - the collector raises it
            self._fail(error)

    async def _join(self, worker: WorkerState) -> None:
        assert self._host is not None, "leases but no host to start workers on"
        with span(self._telemetry, self.clock, JOIN, lease=worker.lease.lease_id, worker=worker.lease.worker_id):
            worker.handle = await self._host.start(worker.lease)
            worker.phase = WorkerPhase.LOADING
            await self.publishing.catch_up(worker, worker.handle)
            worker.phase = WorkerPhase.LEAVING if worker.noticed else WorkerPhase.SERVING
            worker.joined_s = worker.reported_s = self.clock.now()
            if self._machines is not None:
                self._machines.joined(worker.lease, worker.joined_s)
                self._act_on_health()

    async def _serve(self, worker: WorkerState) -> None:
        """Receive reports and run commands until one of them fails."""
        assert worker.handle is not None, f"{worker.lease.lease_id} was not started"
        jobs = {
            asyncio.ensure_future(self._receive_reports(worker, worker.handle)),
            asyncio.ensure_future(self._run_commands(worker, worker.handle)),
        }
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _receive_reports(self, worker: WorkerState, handle: Worker) -> None:
        while True:
            report = await handle.next_report(min(RECEIVE_S, self._heartbeat_timeout_s))
            if report is None:
                continue
            tokens = _tokens(report, worker.lease.lease_id)
            worker.reported_s, worker.status = self.clock.now(), report.status
            worker.reported_tokens = tokens
            worker.tokens += tokens
            worker.busy_tokens += tokens
            worker.work.observe(report.status.work)
            if (running := report.status.running) and tokens and worker.slots == self.slots:  # same kind of machine
                self.profile.observe(running, report.status.tokens_per_s)
                self._decode_rate = DecodeRate(report.status.tokens_per_s / running, tokens / running)
            if report.notice_s is not None:
                self._notice(worker, worker.reported_s + report.notice_s, "the worker received a notice")
            if self._machines is not None and worker is not self.local:
                self._judge(self._machines, worker, report)
                if worker.phase is WorkerPhase.GONE:
                    return  # its tokens are wrong
            if self._mailbox is not None:
                self._mailbox.put_reports([report])

    def _judge(self, machines: MachineGuard, worker: WorkerState, report: WorkerReport) -> None:
        now_s = self.clock.now()
        machines.reported(worker.lease, report, now_s)
        idle_s = 0.0 if worker.busy_since_s is not None else now_s - worker.idle_since_s
        if machines.wants_probe(worker.lease, now_s, idle_s=idle_s):
            self.publishing.queue_probe(worker)
        self._act_on_health()

    async def _run_commands(self, worker: WorkerState, handle: Worker) -> None:
        name = "the worker" if worker is self.local else f"worker {worker.lease.worker_id}"
        while True:
            command = await worker.commands.get()
            awaited = f"{name} to {command.description}"
            await self.publishing.wait_for(command.call(handle), awaited, "the worker and its engine")

    def _note_loaded(self) -> None:
        self._act_on_health()
        self._notify()

    def _notify(self) -> None:
        if self._mailbox is not None:
            self._mailbox.notify()

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
    """Number of new tokens in a report. Raises WorkerLost: a delta carries another lease."""
    nbytes = 0
    for delta in report.deltas:  # a plain loop: with many workers this dominates the controller's time
        if delta.lease_id != lease_id:
            raise WorkerLost(f"report carries lease {delta.lease_id}, expected {lease_id}")
        nbytes += len(delta.token_ids)
    return nbytes // ITEM_BYTES
