"""Chunks on the fleet: which are open, and which worker computes each.

```
 run(version, requests) ──▶ waiting ──dispatch──▶ held by a lease ──report──▶ answer
                               ▲                        │
                               └──── the lease ends ◀───┘
```
A chunk is a pure function, so a lost one simply waits again: there are no attempts, partial results or journal. The
first answer counts, and experience and next state come from it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import msgspec

from tidemill.controller.fleet import Fleet
from tidemill.controller.waiting import LeaseOutcome, Mailbox, Messages, Timeouts, Wait, log_waiting
from tidemill.controller.worker_state import WorkerCommand
from tidemill.core.chunks import HELD, Array, ChunkAnswer, ChunkJob, ChunkReport, ChunkRequest, Simulator
from tidemill.core.errors import TidemillError, UserError
from tidemill.core.protocols import Clock, Telemetry
from tidemill.core.records import PolicyVersion, WeightManifest

DEPTH = 2
"""Chunks that a worker holds: the one it computes, and one more, so that it does not wait for its transport."""
MOST_DEATHS = 10
"""Workers that may end by themselves while they compute the same chunk. Kills from outside hit one chunk a few times
by chance."""


class WeightBlobs:
    """Implements `core.protocols.Publisher`: the weights of the newest version and the one before, as they travel."""

    def __init__(self) -> None:
        self._blobs: dict[int, bytes] = {}

    def put(self, version: PolicyVersion, weights: Mapping[str, Array]) -> None:
        """Keep the weights that are published next."""
        self._blobs = {number: blob for number, blob in self._blobs.items() if number >= version.number - 1}
        self._blobs[version.number] = msgspec.msgpack.encode(weights)

    def __getitem__(self, number: int) -> bytes:
        return self._blobs[number]

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        nbytes = len(self._blobs[version.number])
        return WeightManifest(version=version, digest=version.digest, nbytes=nbytes, tensors=())

    async def close(self) -> None:
        self._blobs.clear()


@dataclass(slots=True, eq=False)
class OpenChunk:
    """A chunk without an answer."""

    job: ChunkJob
    result: asyncio.Future[ChunkAnswer]
    lease_id: str = ""  # of the worker that holds it; empty: it waits
    deaths: int = 0  # of workers that computed it

    @property
    def shard(self) -> tuple[int, str, int]:
        request = self.job.request
        return request.setup, request.key.purpose, request.key.shard


@dataclass(kw_only=True, eq=False)
class FleetChunks:
    """Implements `core.chunks.Chunks`. An async context manager within that of the fleet, to which nobody else gives
    work."""

    fleet: Fleet
    blobs: WeightBlobs
    clock: Clock
    telemetry: Telemetry
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        self._mailbox = Mailbox()
        self._open: dict[int, OpenChunk] = {}
        self._waiting: deque[OpenChunk] = deque()
        self._held: dict[str, list[int]] = {}  # numbers of chunks by lease, in the order in which it computes them
        self._homes: dict[tuple[int, str, int], str] = {}  # leases of shards whose state is in the worker
        self._count = 0
        self._repeated = 0
        self._failure: Exception | None = None
        self._checked_s = self._logged_s = 0.0
        self._served_s = 0.0  # time without an answer in which there were workers
        self._absent_s = 0.0  # time without any worker

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow_fleet(), name="chunks")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def publish(self, version: PolicyVersion, weights: Mapping[str, Array]) -> None:
        self.blobs.put(version, weights)
        await self.fleet.publishing.publish(version)

    async def run(self, version: int, requests: Sequence[ChunkRequest]) -> list[ChunkAnswer]:
        if self._failure is not None:
            raise self._failure
        if not self._open:
            self._note_progress()
        chunks = []
        for number, request in enumerate(requests, start=self._count):
            job = ChunkJob(number=number, version=version, request=request)
            chunks.append(OpenChunk(job, asyncio.get_running_loop().create_future()))
        self._count += len(chunks)
        self._open |= {chunk.job.number: chunk for chunk in chunks}
        self._waiting.extend(chunks)
        self._mailbox.notify()
        try:
            return await asyncio.gather(*(chunk.result for chunk in chunks))
        finally:
            for chunk in chunks:  # if one failed, the others are not wanted any more
                self._open.pop(chunk.job.number, None)
                chunk.result.cancel()

    def take_figures(self) -> dict[str, float]:
        repeated, self._repeated = self._repeated, 0
        fleet = self.fleet.event_log.take_figures()
        return {name: fleet[name] for name in ("evictions", "crashes")} | {"robot/repeated_chunks": float(repeated)}

    async def _follow_fleet(self) -> None:
        try:
            with self.fleet.delivering_to(self._mailbox):
                while True:
                    messages = await self._mailbox.take(self.timeouts.notice_s)
                    self._receive(messages)
                    self._dispatch()
                    self.telemetry.fleet(self.fleet.rows())
                    self._check_deadline()
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._failure = error
            for chunk in self._open.values():
                if not chunk.result.done():
                    chunk.result.set_exception(error)

    def _receive(self, messages: Messages) -> None:
        """
        Raises:
            UserError: a chunk cannot be computed.
            TidemillError: a chunk ends its workers.
        """
        for report in messages.reports:
            if isinstance(report, ChunkReport) and report.number >= 0:
                self._answered(report)
        for lease_id in messages.draining:  # others compute what it does not finish
            self._wait_again(lease_id)
        for outcome in messages.ended:
            self._lost(outcome)
        if messages.failures:
            raise messages.failures[0]

    def _answered(self, report: ChunkReport) -> None:
        held = self._held.get(report.lease_id, [])
        if report.number in held:
            held.remove(report.number)
            if not held and report.lease_id in self.fleet:
                self.fleet.note_idle(report.lease_id)
        chunk = self._open.get(report.number)
        if chunk is None or chunk.result.done():
            return  # another answer was first, or nobody wants it any more: then its weights may be gone, too
        if (failure := report.failure) is not None:
            raise UserError(failure.what, where=failure.where, hint=failure.hint)
        assert report.answer is not None, "a report on a job has an answer or a failure"
        del self._open[report.number]
        chunk.result.set_result(report.answer)
        if HELD in report.answer.state:
            self._homes[chunk.shard] = report.lease_id
        self._note_progress()

    def _wait_again(self, lease_id: str) -> int:
        """Let the chunks of a lease be computed by others; returns their number."""
        held = [self._open[number] for number in self._held.get(lease_id, []) if number in self._open]
        lost = [chunk for chunk in held if chunk.lease_id == lease_id]
        for chunk in reversed(lost):
            chunk.lease_id = ""
            self._waiting.appendleft(chunk)
        self._repeated += bool(lost)  # it computed the first only
        return len(lost)

    def _lost(self, outcome: LeaseOutcome) -> None:
        self.fleet.event_log.ended(outcome, [], chunks=self._wait_again(outcome.lease_id))
        held = self._held.pop(outcome.lease_id, [])
        computed = self._open.get(held[0]) if held else None
        if not outcome.died or computed is None:
            return
        computed.deaths += 1
        if computed.deaths == MOST_DEATHS:
            key = computed.job.request.key
            raise TidemillError(
                f"chunk {key.iteration} of shard {key.shard} ({key.purpose}) ended {MOST_DEATHS} workers; the last: "
                f"{outcome.cause}\n  look at the memory of the machines, and at what the task or environment does there"
            )

    def _dispatch(self) -> None:
        """Give waiting chunks to workers, in their order."""
        loads = {each.lease.lease_id: len(self._held.get(each.lease.lease_id, [])) for each in self.fleet.serving()}
        kept: deque[OpenChunk] = deque()
        while self._waiting:
            chunk = self._waiting.popleft()
            if chunk.job.number not in self._open:
                continue  # answered after all
            lease_id = min(loads, key=lambda each: loads[each], default="")
            if HELD in chunk.job.request.state and (home := self._homes.get(chunk.shard)) in loads:
                lease_id = home
            if not lease_id or loads[lease_id] >= DEPTH:
                kept.append(chunk)
                continue
            loads[lease_id] += 1
            chunk.lease_id = lease_id
            self._held.setdefault(lease_id, []).append(chunk.job.number)
            key = chunk.job.request.key
            command = WorkerCommand(partial(_submit, chunk.job), "take a chunk")
            self.fleet.call(lease_id, command, work=1, step=key.iteration, purpose=key.purpose)
        self._waiting = kept

    def _check_deadline(self) -> None:
        """Raises DeadlineError: nothing was computed for too long."""
        now_s, has_workers = self.clock.now(), self.fleet.serving_count > 0
        elapsed_s, self._checked_s = now_s - self._checked_s, now_s
        if not self._open:
            return
        self._served_s += elapsed_s if has_workers else 0.0
        self._absent_s = 0.0 if has_workers else self._absent_s + elapsed_s
        wait = Wait(
            awaited=f"{len(self._open)} chunks from {self.fleet.serving_count} workers",
            look_at="the task's speed and the evictions: a machine must live longer than a chunk takes",
            deadline_s=self.timeouts.worker_s,
        )
        if not has_workers:
            deadline_s = self.timeouts.pool_s
            wait = Wait(awaited="a worker for chunks", look_at="the pool and failed joins", deadline_s=deadline_s)
        waited_s = self._served_s if has_workers else self._absent_s
        if now_s - self._logged_s >= self.timeouts.notice_s or waited_s >= wait.deadline_s:
            self._logged_s = now_s
            log_waiting(wait, waited_s=waited_s, telemetry=self.telemetry)

    def _note_progress(self) -> None:
        self._served_s = self._absent_s = 0.0
        self._checked_s = self._logged_s = self.clock.now()


async def _submit(job: ChunkJob, simulator: Any) -> None:
    handle: Simulator = simulator
    await handle.submit(job)
