"""Chunks on the real fleet, in virtual time, with simulators that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fault_simulation.chunks import HEARTBEAT_S
from tests.virtual_time import run_virtual
from tidemill.controller.chunks import DEPTH, FleetChunks, WeightBlobs
from tidemill.controller.fleet import Fleet
from tidemill.controller.waiting import Timeouts
from tidemill.core.chunks import HELD, Array, ChunkAnswer, ChunkFailure, ChunkJob, ChunkKey, ChunkReport, ChunkRequest
from tidemill.core.errors import DeadlineError, TidemillError, UserError, WorkerLost
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Lease, Loaded, PolicyVersion, WorkerStatus
from tidemill.pool.provider import BackOff, Change, ScheduledProvider
from tidemill.telemetry.recorder import NullTelemetry

Compute = Callable[[str, ChunkJob], Coroutine[Any, Any, ChunkAnswer | ChunkFailure]]


def answer_of(job: ChunkJob, *, held: bool = False) -> ChunkAnswer:
    mark = {HELD: Array(dtype="|u1", shape=(1,), data=b"1")} if held else {}
    return ChunkAnswer(key=job.request.key, version=job.version, experience={}, state=mark)


async def quick(worker_id: str, job: ChunkJob) -> ChunkAnswer | ChunkFailure:
    await asyncio.sleep(1.0)
    return answer_of(job)


class ScriptedSimulator:
    """Implements `core.chunks.Simulator`; `compute` raises WorkerLost to end the process."""

    def __init__(self, lease: Lease, compute: Compute) -> None:
        self._lease, self._compute = lease, compute
        self.jobs: asyncio.Queue[ChunkJob] = asyncio.Queue()
        self._reports: asyncio.Queue[ChunkReport | WorkerLost] = asyncio.Queue()
        self._task = asyncio.create_task(self._work())

    async def load(self, version: PolicyVersion) -> Loaded:
        return Loaded(version=version)

    async def submit(self, job: ChunkJob) -> None:
        self.jobs.put_nowait(job)

    async def next_report(self, timeout_s: float) -> ChunkReport | None:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                report = await self._reports.get()
        except TimeoutError:
            return self._report()
        if isinstance(report, WorkerLost):
            raise report
        return report

    def kill(self) -> None:
        self._task.cancel()

    def _report(self, **result: Any) -> ChunkReport:
        status = WorkerStatus(worker_id=self._lease.worker_id, version=0, running=0, queued=0, free_slots=1)
        return ChunkReport(lease_id=self._lease.lease_id, deltas=(), status=status, **result)

    async def _work(self) -> None:
        while True:
            job = await self.jobs.get()
            try:
                result = await self._compute(self._lease.worker_id, job)
            except WorkerLost as error:
                self._reports.put_nowait(error)
                return
            name = "answer" if isinstance(result, ChunkAnswer) else "failure"
            self._reports.put_nowait(self._report(number=job.number, **{name: result}))


class ScriptedHost:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.simulators: list[ScriptedSimulator] = []

    async def start(self, lease: Lease) -> Any:
        self.simulators.append(ScriptedSimulator(lease, self._compute))
        return self.simulators[-1]

    async def close(self) -> None:
        pass


UP = tuple(Change(time_s=0.0, place=place, to="up") for place in range(2))


@asynccontextmanager
async def chunks_on(
    compute: Compute, changes: Sequence[Change] = UP, timeouts: Timeouts | None = None
) -> AsyncIterator[FleetChunks]:
    clock, blobs, telemetry = LoopClock(), WeightBlobs(), NullTelemetry()
    back_off = BackOff(first_s=0.1, longest_s=0.1)
    provider = ScheduledProvider(iter(changes), clock=clock, session=1, back_off=back_off)
    host: Any = ScriptedHost(compute)
    fleet = Fleet(None, slots=DEPTH, clock=clock, telemetry=telemetry, provider=provider, host=host, publisher=blobs)
    chunks = FleetChunks(fleet=fleet, blobs=blobs, clock=clock, telemetry=telemetry, timeouts=timeouts or Timeouts())
    async with fleet, chunks:
        await chunks.publish(PolicyVersion(number=0, digest="0"), {})
        yield chunks


def requests(count: int, *, iteration: int = 0, held: bool = False) -> list[ChunkRequest]:
    state = {HELD: Array(dtype="|u1", shape=(1,), data=b"1")} if held else {}
    keys = [ChunkKey(seed=0, purpose="train", shard=shard, iteration=iteration) for shard in range(count)]
    return [ChunkRequest(key=key, steps=1, state=state) for key in keys]


def test_answers_are_in_the_order_of_the_requests_and_workers_share_them() -> None:
    seen: list[tuple[str, int]] = []

    async def compute(worker_id: str, job: ChunkJob) -> ChunkAnswer | ChunkFailure:
        shard = job.request.key.shard
        seen.append((worker_id, shard))
        await asyncio.sleep(5.0 - shard)
        return answer_of(job)

    async def run() -> list[int]:
        async with chunks_on(compute) as chunks:
            return [answer.key.shard for answer in await chunks.run(0, requests(5))]

    assert run_virtual(run()) == [0, 1, 2, 3, 4]
    assert {worker for worker, _ in seen} == {"spot-0", "spot-1"}


def test_a_worker_holds_one_chunk_beyond_the_one_it_computes() -> None:
    async def run() -> list[int]:
        async with chunks_on(quick) as chunks:
            running = asyncio.create_task(chunks.run(0, requests(8)))
            await asyncio.sleep(0.5)
            queued = [len(numbers) for numbers in chunks._held.values()]
            await running
            return queued

    assert run_virtual(run()) == [2, 2]


def test_lost_chunks_are_computed_again_and_counted() -> None:
    changes = (*UP, Change(time_s=0.5, place=0, to="down"))

    async def run() -> tuple[int, dict[str, float]]:
        async with chunks_on(quick, changes) as chunks:
            answers = await chunks.run(0, requests(6))
            return len(answers), chunks.take_figures()

    assert run_virtual(run()) == (6, {"evictions": 1.0, "crashes": 0.0, "robot/repeated_chunks": 1.0})


def test_a_failing_task_ends_the_run_with_its_message() -> None:
    async def compute(worker_id: str, job: ChunkJob) -> ChunkAnswer | ChunkFailure:
        if job.request.key.shard == 1:
            return ChunkFailure(what="ZeroDivisionError: division by zero", where="robot", hint="task.py, line 3")
        return await quick(worker_id, job)

    async def run() -> None:
        async with chunks_on(compute) as chunks:
            with pytest.raises(UserError, match="robot: ZeroDivisionError"):
                await chunks.run(0, requests(4))
            with pytest.raises(UserError):  # nothing is computed afterwards
                await chunks.run(0, requests(1))

    run_virtual(run())


def test_a_chunk_that_ends_many_workers_ends_the_run() -> None:
    async def compute(worker_id: str, job: ChunkJob) -> ChunkAnswer | ChunkFailure:
        if job.request.key.shard == 1:
            raise WorkerLost("its process was ended by SIGSEGV")
        return await quick(worker_id, job)

    async def run() -> None:
        async with chunks_on(compute) as chunks:
            await chunks.run(0, requests(2))

    with pytest.raises(TidemillError, match=r"of shard 1 \(train\) ended 10 workers; the last: its process was .*V"):
        run_virtual(run())


async def never(worker_id: str, job: ChunkJob) -> ChunkAnswer | ChunkFailure:
    await asyncio.sleep(1e9)
    return answer_of(job)


FLAPPING = tuple(
    Change(time_s=10.0 * at, place=0, to="down" if at % 2 else "up") for at in range(100)
)  # no machine lives as long as a chunk takes


@pytest.mark.parametrize(
    ("changes", "awaited", "ended_s"),
    [
        (UP, "2 chunks from 2 workers", 135.0),
        ((), "a worker for chunks", 135.0),
        (FLAPPING, "2 chunks from 1 workers", 220.0),
    ],
    ids=["hanging", "no machine", "short lives"],
)
def test_a_wait_without_progress_ends_at_its_deadline(changes: Sequence[Change], awaited: str, ended_s: float) -> None:
    async def run() -> float:
        timeouts = Timeouts(worker_s=100.0, pool_s=100.0)
        async with chunks_on(never, changes, timeouts) as chunks:
            with pytest.raises(DeadlineError, match=awaited):
                await chunks.run(0, requests(2))
            return LoopClock().now()

    assert run_virtual(run()) < ended_s


def test_a_state_that_a_worker_holds_is_continued_by_this_worker() -> None:
    seen: dict[tuple[int, int], str] = {}

    async def compute(worker_id: str, job: ChunkJob) -> ChunkAnswer | ChunkFailure:
        key = job.request.key
        seen[key.iteration, key.shard] = worker_id
        await asyncio.sleep(1.0 + 10.0 * (worker_id == "spot-0"))  # the others are free much earlier
        return answer_of(job, held=True)

    async def run() -> None:
        async with chunks_on(compute) as chunks:
            await chunks.run(0, requests(4))
            await chunks.run(0, requests(4, iteration=1, held=True))

    run_virtual(run())
    assert [seen[1, shard] for shard in range(4)] == [seen[0, shard] for shard in range(4)]


def test_a_version_and_the_one_before_are_kept() -> None:
    blobs = WeightBlobs()
    for number in range(3):
        blobs.put(PolicyVersion(number=number, digest=""), {})

    assert blobs[1] == blobs[2]
    with pytest.raises(KeyError):
        blobs[0]
