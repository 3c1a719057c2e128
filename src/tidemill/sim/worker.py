"""A worker whose engine decodes at a stated speed and computes nothing."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.core.buffers import ITEM_BYTES, count
from tidemill.core.clock import Clock
from tidemill.core.errors import WorkerLost
from tidemill.core.records import (
    Finish,
    GenerateRequest,
    Lease,
    Loaded,
    PolicyVersion,
    Record,
    SampleId,
    TokenDelta,
    WorkerReport,
    WorkerStatus,
)


class Speed(Record):
    """How fast an engine is. A decode step takes as long for `plateau` samples as for one, and longer for more."""

    slots: int  # samples decoded at once
    plateau: int  # samples that cost no more than one
    step_s: float  # of up to `plateau` samples
    prefill_tokens_per_s: float
    boot_s: float = 0.0
    pull_s: float = 0.0

    def decode_step_s(self, running: int) -> float:
        return self.step_s * max(1.0, running / self.plateau)

    @property
    def peak_tokens_per_s(self) -> float:
        """The most it can decode."""
        return self.slots / self.decode_step_s(self.slots)


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerateRequest
    at: int  # completion tokens there are
    flushed: int
    length: int


class SimulatedWorker:
    """Implements `core.protocols.Worker` on the loop's clock; tokens are zeros.

    Args:
        length: how long a sample's completion is.
        tick_s: how often it reports.
    """

    def __init__(
        self, speed: Speed, lease: Lease, *, length: Callable[[SampleId], int], clock: Clock, tick_s: float
    ) -> None:
        self.generated = 0
        self._speed, self._lease, self._length, self._clock, self._tick_s = speed, lease, length, clock, tick_s
        self._running: list[_Running] = []
        self._queue: deque[GenerateRequest] = deque()
        self._ended: list[TokenDelta] = []
        self._prompts: OrderedDict[str, None] = OrderedDict()  # whose keys and values some slot still has
        self._version = PolicyVersion(number=-1, digest="")
        self._until_s = clock.now()  # what was simulated so far
        self._last_generated = 0
        self._dead = False

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._check()
        self._advance()
        self._queue.extend(requests)
        self._admit()

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        self._check()
        self._advance()
        gone = set(sample_ids)
        queued = [request for request in self._queue if request.sample_id in gone]
        self._queue = deque(request for request in self._queue if request.sample_id not in gone)
        self._ended += [self._delta(self._fresh(request), "aborted") for request in queued]
        self._ended += [self._delta(one, "aborted") for one in self._running if one.request.sample_id in gone]
        self._running = [one for one in self._running if one.request.sample_id not in gone]

    async def load(self, version: PolicyVersion) -> Loaded:
        await asyncio.sleep(self._speed.pull_s)
        self._check()
        self._version = version
        return Loaded(version=version, pull_s=self._speed.pull_s)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        """One per tick; `timeout_s` is longer than that."""
        await asyncio.sleep(self._tick_s)
        self._check()
        self._advance()
        deltas = [*self._ended, *(self._delta(one, None) for one in self._running if one.at > one.flushed)]
        self._ended = []
        made, self._last_generated = self.generated - self._last_generated, self.generated
        status = WorkerStatus(
            worker_id=self._lease.worker_id,
            version=self._version.number,
            running=len(self._running),
            queued=len(self._queue),
            free_slots=self._speed.slots - len(self._running),
            tokens_per_s=made / self._tick_s,
            tokens_generated=self.generated,
        )
        return WorkerReport(lease_id=self._lease.lease_id, deltas=tuple(deltas), status=status)

    async def close(self) -> None:
        self._dead = True

    def kill(self) -> None:
        self._dead = True

    def _check(self) -> None:
        if self._dead:
            raise WorkerLost(f"worker {self._lease.worker_id} is gone")

    def _advance(self) -> None:
        """Decode up to now: as many whole steps as fit, a finished sample's slot being filled at once."""
        now_s = self._clock.now()
        while self._running:
            step_s = self._speed.decode_step_s(len(self._running))
            finishing = min(one.length - one.at for one in self._running)
            steps = min(finishing, math.floor((now_s - self._until_s) / step_s + 1e-9))
            if steps <= 0:
                return
            self._until_s += steps * step_s
            self.generated += steps * len(self._running)
            for one in self._running:
                one.at += steps
            self._ended += [self._delta(one, "stop") for one in self._running if one.at >= one.length]
            self._running = [one for one in self._running if one.at < one.length]
            self._admit()
        self._until_s = max(self._until_s, now_s)

    def _admit(self) -> None:
        """Fill free slots. A prompt and the tokens brought along are computed before decoding goes on."""
        while self._queue and len(self._running) < self._speed.slots:
            one = self._fresh(self._queue.popleft())
            self._until_s += (self._uncached(one.request) + one.at) / self._speed.prefill_tokens_per_s
            self._running.append(one)

    def _uncached(self, request: GenerateRequest) -> int:
        """Prompt tokens to compute: none when a sibling came lately."""
        name = request.sample_id.prompt_id
        known = name in self._prompts
        self._prompts[name] = None
        self._prompts.move_to_end(name)
        while len(self._prompts) > self._speed.slots:
            self._prompts.popitem(last=False)
        return 0 if known else count(request.prompt_ids)

    def _fresh(self, request: GenerateRequest) -> _Running:
        at = count(request.prefix_ids)
        return _Running(request, at, at, max(at + 1, self._length(request.sample_id)))

    def _delta(self, one: _Running, finish: Finish | None) -> TokenDelta:
        new, start = one.at - one.flushed, one.flushed
        one.flushed = one.at
        return TokenDelta(
            sample_id=one.request.sample_id,
            lease_id=one.request.lease_id,
            attempt=one.request.attempt,
            start=start,
            token_ids=bytes(new * ITEM_BYTES),
            logprobs=bytes(new * ITEM_BYTES),
            version=self._version,
            finish=finish,
        )


class SimulatedHost:
    """Implements `core.protocols.WorkerHost`: every machine has the same engine."""

    def __init__(self, speed: Speed, *, length: Callable[[SampleId], int], clock: Clock, tick_s: float) -> None:
        self.workers: list[SimulatedWorker] = []
        self._speed, self._length, self._clock, self._tick_s = speed, length, clock, tick_s

    async def start(self, lease: Lease) -> SimulatedWorker:
        await asyncio.sleep(self._speed.boot_s)
        worker = SimulatedWorker(self._speed, lease, length=self._length, clock=self._clock, tick_s=self._tick_s)
        self.workers.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()
