"""A simulated worker, the host that starts it, and reports of evicted workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import Clock, Provider, WeightSource
from tidemill.core.records import (
    GenerateRequest,
    Lease,
    LeaseEnded,
    LeaseEvent,
    Loaded,
    LogprobBuffer,
    PolicyVersion,
    Pulled,
    SampleId,
    TokenBuffer,
    TokenDelta,
    WorkerReport,
    WorkerStatus,
)
from tidemill.sim.costs import EngineCosts, WeightCosts
from tidemill.sim.simulated_engine import EPSILON_S, SimulatedEngine
from tidemill.sim.simulated_trainer import CountedWeights, Uplink
from tidemill.sim.workload import Completions


class SimulatedWorker:
    """Implements `core.protocols.Worker` on the loop's clock.

    It reports every `tick_s` seconds while samples run, and after an abort or a load. With an infinite tick it reports
    only finished samples, so that a thousand workers can be simulated; `flush` then reports the progress of running
    ones.

    Args:
        source: source of weights for `load`; None for the trainer's engine, which shares them.
        heartbeat_s: longest time between two reports.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        *,
        clock: Clock,
        worker_id: str,
        lease_id: str,
        source: WeightSource | None,
        swap_s: float = 0.0,
        tick_s: float = math.inf,
        heartbeat_s: float = math.inf,
    ) -> None:
        self.engine = engine
        self._clock, self._worker_id, self._lease_id, self._source = clock, worker_id, lease_id, source
        self._swap_s, self._tick_s, self._heartbeat_s = swap_s, tick_s, heartbeat_s
        self._reported_s = clock.now()
        self._notice_s: float | None = None
        self._flushed: list[TokenDelta] = []
        self._report_now = False
        self._reader: asyncio.Future[None] | None = None
        self._right_probe = b""
        self._dead = False
        self._failure: Exception | None = None

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._check()
        idle = not self.engine.running
        self.engine.submit(requests, self._clock.now())
        if idle:
            self._reported_s = self._clock.now()  # a tick starts
        self._wake()

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        self._check()
        self.engine.abort(sample_ids, self._clock.now())
        self._request_report()

    async def load(self, version: PolicyVersion) -> Loaded:
        if self._source is None:
            self._check()
            self.engine.load(version, computes_with=version, swap_s=self._swap_s, now_s=self._clock.now())
            self._request_report()
            return Loaded(version=version, swap_s=self._swap_s)
        pulled = await self._source.prepare(version)
        self._check()
        await self._swap(pulled)
        self._right_probe = pulled.manifest.probe_logprobs
        version = pulled.manifest.version
        computes_with = self.computes_with(version)
        self.engine.load(version, computes_with=computes_with, swap_s=self._swap_s, now_s=self._clock.now())
        self._request_report()
        return Loaded(
            version=version,
            nbytes=pulled.nbytes,
            full=pulled.full,
            pull_s=pulled.pull_s,
            swap_s=self._swap_s,
            retries=pulled.retries,
            probe_logprobs=self.probe(pulled.manifest.probe_logprobs),
        )

    async def _swap(self, pulled: Pulled) -> None:
        """Overridden where it takes time and may fail."""
        assert self._source is not None
        self._source.swap(pulled)

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        self._check()
        return self.probe(self._right_probe)

    def computes_with(self, version: PolicyVersion) -> PolicyVersion:
        """The weights that really generate after a load of `version`; overridden to inject faults."""
        return version

    def probe(self, right: bytes) -> bytes:
        """The worker's probe logprobs, given the publisher's; overridden to inject faults."""
        return right

    def notice(self, seconds: float) -> None:
        """Announce the eviction in `seconds` with an immediate report."""
        self._notice_s = seconds
        self._request_report()

    def flush(self) -> None:
        """Report the progress of all samples now."""
        self._flushed += self.engine.flush(self._clock.now())
        self._request_report()

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        deadline_s = self._clock.now() + timeout_s
        while True:
            self._check()
            now_s = self._clock.now()
            self.engine.advance(now_s)
            ended = self.engine.ended and self._tick_s == math.inf
            if self._report_now or ended or now_s - self._reported_s >= self._pause_s - EPSILON_S:
                return self._report(now_s)
            if now_s >= deadline_s - EPSILON_S:
                return None
            end_s = self.engine.next_change_s() if self._tick_s == math.inf else math.inf
            await self._sleep(min(deadline_s, max(now_s, min(end_s, self._reported_s + self._pause_s))))

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._dead = True
        self._wake()
        if self._source is not None:
            self._source.close()

    def fail(self, error: Exception) -> None:
        """Make this and every later call raise `error`."""
        self._failure = error
        self._wake()

    @property
    def _pause_s(self) -> float:
        """Longest time between two reports."""
        busy = self.engine.running or self.engine.ended
        return min(self._tick_s, self._heartbeat_s) if busy else self._heartbeat_s

    def _report(self, now_s: float) -> WorkerReport:
        engine, deltas = self.engine, self._flushed
        self._flushed = []
        deltas += engine.take_ended()
        if now_s - self._reported_s >= self._tick_s - EPSILON_S:
            deltas += engine.flush(now_s)
        self._reported_s, self._report_now = now_s, False
        notice_s, self._notice_s = self._notice_s, None
        status = WorkerStatus(
            worker_id=self._worker_id,
            version=engine.version.number,
            running=engine.running,
            queued=engine.queued,
            free_slots=engine.costs.slots - engine.running,
            tokens_per_s=engine.tokens_per_s,
            prompt_tokens_computed=engine.prefilled,
            prompt_tokens_reused=engine.reused,
            tokens_generated=engine.generated,
        )
        return WorkerReport(lease_id=self._lease_id, deltas=tuple(deltas), status=status, notice_s=notice_s)

    async def _sleep(self, until_s: float) -> None:
        """Sleep until `until_s` or the next call to the worker."""
        loop = asyncio.get_running_loop()
        self._reader = reader = loop.create_future()
        timer = loop.call_at(until_s, self._wake) if until_s < math.inf else None
        try:
            await reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def _request_report(self) -> None:
        self._report_now = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._dead:
            raise WorkerLost(f"worker {self._worker_id} was lost")


class SimulatedHost:
    """Implements `core.protocols.WorkerHost`; all machines have equal engines."""

    def __init__(
        self,
        engine: EngineCosts,
        weights: WeightCosts,
        *,
        completions: Completions,
        clock: Clock,
        tick_s: float = math.inf,
        heartbeat_s: float = math.inf,
        engine_type: Callable[..., SimulatedEngine] = SimulatedEngine,
    ) -> None:
        self.workers: dict[str, SimulatedWorker] = {}  # by lease
        self._engine, self._weights, self._completions, self._clock = engine, weights, completions, clock
        self._tick_s, self._heartbeat_s, self._engine_type = tick_s, heartbeat_s, engine_type
        self._uplink = Uplink(weights.uplink_bytes_per_s, weights.downlink_bytes_per_s, clock)

    async def start(self, lease: Lease) -> SimulatedWorker:
        await asyncio.sleep(self._engine.boot_s)
        worker = SimulatedWorker(
            self._engine_type(self._engine, self._completions, now_s=self._clock.now()),
            clock=self._clock,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            source=CountedWeights(self._weights, self._clock, self._uplink),
            swap_s=self._weights.swap_s,
            tick_s=self._tick_s,
            heartbeat_s=self._heartbeat_s,
        )
        self.workers[lease.lease_id] = worker
        return worker

    async def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()


class FinalReportProvider:
    """A `Provider` that makes a worker report its tokens before its lease ends, as one with ticks would have.

    Args:
        tick_s: of a real worker; tokens of the last tick are lost.
    """

    def __init__(self, inner: Provider, host: SimulatedHost, *, tick_s: float = 0.1) -> None:
        self._inner, self._host, self._tick_s = inner, host, tick_s

    def request_workers(self, workers: int) -> None:
        self._inner.request_workers(workers)

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        event = await self._inner.next_event(timeout_s)
        if isinstance(event, LeaseEnded) and (worker := self._host.workers.get(event.lease_id)) is not None:
            worker.flush()
            await asyncio.sleep(self._tick_s)  # the report is read; tokens made meanwhile are lost
        return event

    async def release(self, lease_id: str) -> None:
        await self._inner.release(lease_id)

    def avoid(self, machine: str, seconds: float) -> None:
        self._inner.avoid(machine, seconds)

    async def close(self) -> None:
        await self._inner.close()
