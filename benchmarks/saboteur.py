"""A pool with scripted evictions that counts lost tokens.

```
 fleet ◀──grants, notices, ends── Saboteur ──start──▶ the run's own host
   └────calls──▶ Victim ──▶ EngineWorker ──▶ CutEngine ──▶ the engine
                                        └──▶ CutSource ──▶ the puller
```
Cues are events (a report, an engine step, a pull), not times, so the frequency of each kind of eviction does not depend
on the machine. A tick is a fixed number of engine steps for the same reason.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Literal, TypeAlias

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, Engine, EngineCapabilities, EngineStatus, WeightSource, WorkerHost
from tidemill.core.records import (
    GenerateRequest,
    Lease,
    LeaseEnded,
    LeaseEvent,
    LeaseGranted,
    LeaseNoticed,
    Loaded,
    LogprobBuffer,
    PolicyVersion,
    Pulled,
    Record,
    SampleId,
    TokenBuffer,
    TokenDelta,
    WorkerReport,
    count,
)
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import OpenBackend, RuntimeBackend
from tidemill.runtime.local import in_process
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

Cue: TypeAlias = Literal["mid_tick", "noticed", "pull", "join"]
"""Within a tick without notice; with a notice; while a serving worker pulls; while a new worker pulls."""

CUES: tuple[Cue, ...] = ("mid_tick", "noticed", "mid_tick", "pull", "mid_tick", "join", "mid_tick", "noticed")
PATIENCE_S = 30.0
"""Longest wait for the fleet."""
NOTICE_TICKS = 25
"""Length of a notice in engine ticks; then the worker is cut within the next tick, unless it is idle."""


class Eviction(Record):
    """The losses of one eviction."""

    lease_id: str
    cue: Cue
    told_by_provider: bool  # else found dead
    tokens_lost: int  # generated and never received by the fleet
    tokens_of_cut_tick: int  # of those, generated since the last complete tick
    tick_tokens: int  # of a tick with all slots in use
    ticks_after_notice: int = 0  # started until nothing was left to generate


class CutEngine:
    """Implements `core.protocols.Engine`: ticks of `steps` engine steps, the last of them cut in the middle.

    Args:
        cut_step: the earliest step of a tick for the cut.
        cut: called on the engine's thread in a poll that has generated tokens, when `due()`; returns once the machine
            is gone.
    """

    def __init__(self, engine: Engine, *, steps: int, cut_step: int, due: Callable[[], bool], cut: Callable[[], None]):
        self._engine, self._steps, self._cut_step, self._due, self._cut = engine, steps, cut_step, due, cut
        self.ticks = 0  # begun
        self.made = 0  # tokens
        self.made_before = 0  # at the start of the current tick

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._engine.capabilities

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._engine.submit(requests)

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        deltas = dict[SampleId, TokenDelta]()
        self.ticks += 1
        for step in range(1, self._steps + 1):
            for delta in self._engine.poll(0.0):
                deltas[delta.sample_id] = _joined(deltas.get(delta.sample_id), delta)
            status = self._engine.status()
            self.made = status.tokens_generated
            if step >= self._cut_step and self.made > self.made_before and self._due():
                self._cut()
                break
            if not status.running + status.queued:
                break
        self.made_before = self.made
        return list(deltas.values())

    def abort(self, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        return self._engine.abort(sample_ids)

    def load(self, version: PolicyVersion) -> None:
        self._engine.load(version)

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return self._engine.probe(token_ids)

    def status(self) -> EngineStatus:
        return self._engine.status()


def _joined(earlier: TokenDelta | None, later: TokenDelta) -> TokenDelta:
    """Merge the deltas of a sample over several steps."""
    if earlier is None:
        return later
    assert earlier.start + count(earlier.token_ids) == later.start, f"{later.sample_id}: missing tokens"
    token_ids, logprobs = earlier.token_ids + later.token_ids, earlier.logprobs + later.logprobs
    return msgspec.structs.replace(later, start=earlier.start, token_ids=token_ids, logprobs=logprobs)


class CutSource:
    """Implements `core.protocols.WeightSource`: a pull selected by `due` never finishes.

    Args:
        due: called with the number of earlier pulls.
        cut: returns once the machine is gone.
    """

    def __init__(self, source: WeightSource, *, due: Callable[[int], bool], cut: Callable[[], None]) -> None:
        self._source, self._due, self._cut, self._pulls = source, due, cut, 0

    async def prepare(self, version: PolicyVersion) -> Pulled:
        pull = asyncio.ensure_future(self._source.prepare(version))
        self._pulls += 1
        try:
            if self._due(self._pulls - 1):
                await asyncio.sleep(0)  # it has requested bytes
                assert not pull.done(), "the pull finished before it could be cut"
                self._cut()
                await asyncio.sleep(PATIENCE_S)  # cancelled by the kill
            return await pull
        finally:
            pull.cancel()

    def swap(self, pulled: Pulled) -> None:
        self._source.swap(pulled)

    def close(self) -> None:
        self._source.close()


@dataclass(eq=False)
class Victim:
    """A worker with a planned end. Implements `core.protocols.Worker` around the host's worker."""

    lease: Lease
    cue: Cue
    after: int  # reports with tokens before its end
    cut_step: int  # the step of a tick in which it ends
    told: bool  # the provider announces the end; else it is found dead
    saboteur: Saboteur
    worker: EngineWorker = field(init=False)
    engine: CutEngine = field(init=False)
    reports: int = 0
    received: int = 0  # tokens
    ticks_at_notice: int = 0
    doomed: bool = False
    gone: threading.Event = field(default_factory=threading.Event)

    def take(self, worker: EngineWorker) -> None:
        """Install the cuts in a started worker."""
        loop = asyncio.get_running_loop()

        def cut_from_thread() -> None:
            loop.call_soon_threadsafe(self.saboteur.evict, self)
            assert self.gone.wait(PATIENCE_S), f"nobody ended {self.lease.lease_id}"

        self.engine = CutEngine(
            worker._engine,
            steps=self.saboteur.steps_per_tick,
            cut_step=self.cut_step,
            due=self._cut_due,
            cut=cut_from_thread,
        )
        source = worker._source
        assert source is not None
        worker._engine, self.worker = self.engine, worker
        worker._source = CutSource(
            source,
            due=lambda earlier: self.cue == ("pull" if earlier else "join"),
            cut=lambda: self.saboteur.evict(self),
        )

    def _cut_due(self) -> bool:
        """Without notice, or long after an ignored one."""
        if self.gone.is_set():
            return False
        if self.cue == "mid_tick":
            return self.reports >= self.after
        return self.ticks_at_notice > 0 and self.engine.ticks > self.ticks_at_notice + NOTICE_TICKS

    @property
    def idle(self) -> bool:
        """Whether nothing is left to generate or report."""
        status = self.engine.status()
        return not (self.worker._in_call or status.running or status.queued) and self.engine.made == self.received

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self.saboteur.attempts[request.sample_id].append(count(request.prefix_ids))
        await self.worker.submit(requests)

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await self.worker.abort(sample_ids)

    async def load(self, version: PolicyVersion) -> Loaded:
        return await self.worker.load(version)

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return await self.worker.run_probe(token_ids)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        report = await self.worker.next_report(timeout_s)
        tokens = sum(count(delta.token_ids) for delta in report.deltas) if report else 0
        self.received += tokens
        self.reports += tokens > 0
        if self.cue == "noticed" and self.reports >= self.after:
            self.saboteur.notice(self)
        return report

    async def close(self) -> None:
        await self.worker.close()

    def kill(self) -> None:
        if not self.gone.is_set():
            self.saboteur.note_end(self)
        self.worker.kill()
        self.gone.set()


class Saboteur:
    """Implements `core.protocols.Provider` and `WorkerHost`: always `workers` machines, each with a planned end.

    Args:
        host: starts the real workers, which must be `EngineWorker`s.
        steps_per_tick: engine steps between two reports.
        grace_s: of a notice. Then the machine goes once its engine is idle (see `NOTICE_TICKS`).
        cues: used in turn.
    """

    def __init__(
        self,
        host: WorkerHost,
        *,
        clock: Clock,
        workers: int,
        steps_per_tick: int = 4,
        grace_s: float = 0.05,
        cues: Sequence[Cue] = CUES,
        seed: int = 0,
    ) -> None:
        self.steps_per_tick, self.evictions = steps_per_tick, list[Eviction]()
        self.attempts: defaultdict[SampleId, list[int]] = defaultdict(list)  # start position of each attempt
        self._host, self._clock, self._grace_s = host, clock, grace_s
        self._cues, self._rng = cycle(cues), random.Random(seed)
        self._events: asyncio.Queue[LeaseEvent] = asyncio.Queue()
        self._victims: dict[str, Victim] = {}
        self._ends: list[asyncio.Task[None]] = []
        for _ in range(workers):
            self._grant()

    @property
    def counts(self) -> dict[str, int]:
        """Evictions by cue."""
        return dict(Counter(eviction.cue for eviction in self.evictions))

    def _grant(self) -> None:
        number = len(self._victims) + 1
        cue = next(self._cues)
        if cue == "pull" and any(one.cue == "pull" and not one.gone.is_set() for one in self._victims.values()):
            cue = "mid_tick"  # several victims that wait for the next publish would idle
        lease = Lease(
            lease_id=f"lease-{number}",
            worker_id=f"spot-{number}",
            kind="preemptible",
            price_usd_per_hour=0.0,
            start_s=self._clock.now(),
        )
        self._victims[lease.lease_id] = Victim(
            lease=lease,
            cue=cue,
            after=self._rng.randint(1, 2),
            cut_step=self._rng.randint(1, self.steps_per_tick),
            told=self._rng.random() < 0.5,
            saboteur=self,
        )
        self._events.put_nowait(LeaseGranted(lease=lease))

    def notice(self, victim: Victim) -> None:
        """Announce the end of its machine, once."""
        if victim.ticks_at_notice or victim.gone.is_set():
            return
        victim.ticks_at_notice = victim.engine.ticks
        deadline_s = self._clock.now() + self._grace_s
        self._events.put_nowait(LeaseNoticed(lease_id=victim.lease.lease_id, deadline_s=deadline_s))
        self._ends.append(asyncio.create_task(self._end_when_idle(victim, deadline_s)))

    async def _end_when_idle(self, victim: Victim, deadline_s: float) -> None:
        await asyncio.sleep(max(0.0, deadline_s - self._clock.now()))
        while not (victim.idle or victim.gone.is_set()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)
        self.evict(victim)

    def evict(self, victim: Victim) -> None:
        """Evict its machine now; another one comes."""
        if victim.doomed or victim.gone.is_set():
            return
        victim.doomed = True
        if not victim.told:
            victim.kill()
        self._events.put_nowait(LeaseEnded(lease_id=victim.lease.lease_id, cause=f"taken ({victim.cue})"))
        self._grant()

    def note_end(self, victim: Victim) -> None:
        if victim.doomed:
            engine, status = victim.engine, victim.engine.status()
            eviction = Eviction(
                lease_id=victim.lease.lease_id,
                cue=victim.cue,
                told_by_provider=victim.told,
                tokens_lost=engine.made - victim.received,
                tokens_of_cut_tick=engine.made - engine.made_before,
                tick_tokens=(status.running + status.free_slots) * self.steps_per_tick,
                ticks_after_notice=engine.ticks - victim.ticks_at_notice if victim.cue == "noticed" else 0,
            )
            self.evictions.append(eviction)

    # The provider.

    def request_workers(self, workers: int) -> None:
        """Ignored."""

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._events.get()
        except TimeoutError:
            return None

    async def release(self, lease_id: str) -> None:
        """Nothing to do: the machine was already replaced."""

    def avoid(self, machine: str, seconds: float) -> None:
        pass

    # The host.

    async def start(self, lease: Lease) -> Victim:
        victim = self._victims[lease.lease_id]
        worker = await self._host.start(lease)
        assert isinstance(worker, EngineWorker), "the saboteur needs workers of this process"
        victim.take(worker)
        return victim

    async def close(self) -> None:
        for task in self._ends:
            task.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)


def sabotaged(hire: Callable[[WorkerHost, Clock], Saboteur]) -> OpenBackend:
    """In one process, with `hire(host, clock)` for the pool; `spec.pool` must ask for workers."""

    def open_backend(
        spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock
    ) -> AbstractAsyncContextManager[RuntimeBackend]:
        return _sabotaged(hire, in_process(spec, run, recorder, clock), clock)

    return open_backend


@asynccontextmanager
async def _sabotaged(
    hire: Callable[[WorkerHost, Clock], Saboteur], opened: AbstractAsyncContextManager[RuntimeBackend], clock: Clock
) -> AsyncIterator[RuntimeBackend]:
    async with opened as backend:
        assert backend.host is not None, "spec.pool requests no workers"
        saboteur = hire(backend.host, clock)
        try:
            yield replace(backend, provider=saboteur, host=saboteur)
        finally:
            await saboteur.close()
