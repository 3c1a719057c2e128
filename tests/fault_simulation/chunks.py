"""Chunks among faults: the real fleet and `controller.chunks`, with simulated machines and simulators.

Invariants: every answer is that of an undisturbed run, so the states of each shard form one chain; each chunk is
answered once and none is lost; simulators have the weights of their jobs; the run ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.fault_simulation.invariants import Violation, require
from tests.fault_simulation.seed_run import Outcome
from tidemill.config.pool import FleetConfig
from tidemill.controller.chunks import DEPTH, MOST_DEATHS, FleetChunks, WeightBlobs
from tidemill.controller.fleet import Fleet
from tidemill.core.chunks import Array, ChunkAnswer, ChunkJob, ChunkKey, ChunkReport, ChunkRequest
from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Lease, Loaded, PolicyVersion, WorkerStatus
from tidemill.pool.provider import BackOff, Change, ScheduledProvider
from tidemill.runtime.simulators import SentWeights
from tidemill.sim.virtual_time import Deadlock, run_virtual
from tidemill.telemetry.recorder import NullTelemetry

HEARTBEAT_S, LONGEST_S = 1.0, 1e5


class ChunkFaults:
    """What happens in one seed."""

    def __init__(self, seed: int) -> None:
        self.random = chance = random.Random(seed)
        self.seed, self.lag = seed, chance.randrange(2)
        self.shards, self.iterations = chance.randint(1, 8), chance.randint(2, 6)
        self.machines = chance.randint(1, 5)
        self.chunk_s = chance.choice((0.1, 1.0, 4.0))
        self.life_s = self.chunk_s * chance.choice((2.0, 5.0, 30.0))
        self.rate = chance.choice((0.0, 0.05, 0.2))  # of each fault of a process
        self.deaths: Counter[int] = Counter()  # of workers, by chunk
        self.answered: Counter[tuple[int, int]] = Counter()  # reports by shard and iteration
        self.leases = 0
        self.violation = ""  # of a simulator, whose exceptions the fleet handles

    def timetable(self) -> Iterator[Change]:
        """Machines come and go without end."""
        due = [(0.0, place, "up") for place in range(self.machines)]
        while True:
            due.sort()
            at_s, place, to = due.pop(0)
            if to == "noticed":
                deadline_s = at_s + self.random.uniform(0, 2 * self.chunk_s)
                yield Change(time_s=at_s, place=place, to="noticed", deadline_s=deadline_s)
                due.append((deadline_s, place, "down"))
                continue
            yield Change(time_s=at_s, place=place, to="up" if to == "up" else "down")
            wait_s = self.random.expovariate(1 / self.life_s)
            next_change = self.random.choice(("noticed", "down")) if to == "up" else "up"
            due.append((at_s + wait_s, place, next_change))

    def require(self, holds: bool, what: str) -> None:
        self.violation = self.violation or ("" if holds else what)

    def happens(self) -> bool:
        return self.random.random() < self.rate


def computed(version: int, request: ChunkRequest) -> bytes:
    """The state after a chunk."""
    before = request.state["chain"].data if request.state else b""
    return hashlib.blake2b(before + repr((version, request.key)).encode(), digest_size=8).digest()


class SimulatedSimulator:
    """Implements `core.chunks.Simulator` in virtual time, with faults."""

    def __init__(self, lease: Lease, faults: ChunkFaults, blobs: WeightBlobs) -> None:
        self._lease, self._faults = lease, faults
        self._weights = SentWeights(blobs)
        self._versions: dict[int, bytes] = {}
        self._jobs: asyncio.Queue[ChunkJob] = asyncio.Queue()
        self._reports: asyncio.Queue[ChunkReport] = asyncio.Queue()
        self._lost = self._hangs = False
        self._task = asyncio.create_task(self._compute())

    def _receive(self, number: int, *, again: bool = False) -> None:
        for weights in self._weights.missing(number, again=again):
            self._versions = {each: blob for each, blob in self._versions.items() if each >= number - 1}
            self._versions[weights.number] = weights.blob

    async def load(self, version: PolicyVersion) -> Loaded:
        self._check()
        self._receive(version.number, again=True)
        await asyncio.sleep(self._faults.random.uniform(0, 0.1))
        return Loaded(version=version)

    async def submit(self, job: ChunkJob) -> None:
        self._check()
        self._receive(job.version)
        self._faults.require(self._jobs.qsize() < DEPTH, "a worker holds more chunks than it may")
        self._jobs.put_nowait(job)

    async def next_report(self, timeout_s: float) -> ChunkReport | None:
        self._check()
        try:
            async with asyncio.timeout(min(timeout_s, HEARTBEAT_S)):
                return await self._reports.get()
        except TimeoutError:
            self._check()
            return None if self._hangs else self._report()

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._lost = True
        self._task.cancel()

    def _check(self) -> None:
        if self._lost:
            raise WorkerLost("it was killed")

    def _report(self, **result: Any) -> ChunkReport:
        status = WorkerStatus(worker_id=self._lease.worker_id, version=0, running=0, queued=0, free_slots=1)
        return ChunkReport(lease_id=self._lease.lease_id, deltas=(), status=status, **result)

    async def _compute(self) -> None:
        faults, chance = self._faults, self._faults.random
        while True:
            job = await self._jobs.get()
            slow = 20.0 if faults.happens() else 1.0
            await asyncio.sleep(chance.uniform(0.5, 1.5) * faults.chunk_s * slow)
            faults.require(job.version in self._versions, f"a simulator lacks the weights of version {job.version}")
            if faults.happens() and faults.deaths[job.number] < MOST_DEATHS - 1:
                faults.deaths[job.number] += 1
                self._lost, self._hangs = (False, True) if faults.happens() else (True, False)
                return
            state = Array(dtype="|u1", shape=(8,), data=computed(job.version, job.request))
            answer = ChunkAnswer(key=job.request.key, version=job.version, experience={}, state={"chain": state})
            faults.answered[job.request.key.shard, job.request.key.iteration] += 1
            for _ in range(2 if faults.happens() else 1):
                self._reports.put_nowait(self._report(number=job.number, answer=answer))


class SimulatedHost:
    """Implements `core.protocols.WorkerHost`."""

    def __init__(self, faults: ChunkFaults, blobs: WeightBlobs) -> None:
        self._faults, self._blobs = faults, blobs

    async def start(self, lease: Lease) -> Any:
        self._faults.leases += 1
        await asyncio.sleep(self._faults.random.uniform(0.1, 0.5))
        if self._faults.happens():
            raise WorkerLost("it does not start")
        return SimulatedSimulator(lease, self._faults, self._blobs)

    async def close(self) -> None:
        pass


async def train(faults: ChunkFaults) -> float:
    """All iterations as `jobs.control` requests them; returns the virtual time."""
    clock, blobs = LoopClock(), WeightBlobs()
    back_off = BackOff(first_s=0.2, longest_s=1.0)
    fleet = Fleet(
        None,
        slots=DEPTH,
        clock=clock,
        telemetry=NullTelemetry(),
        config=FleetConfig(drain_margin_s=0.2),
        provider=ScheduledProvider(faults.timetable(), clock=clock, session=1, back_off=back_off),
        host=SimulatedHost(faults, blobs),
        publisher=blobs,
    )
    async with fleet, FleetChunks(fleet=fleet, blobs=blobs, clock=clock, telemetry=NullTelemetry()) as chunks:
        states: list[dict[str, Array]] = [{}] * faults.shards
        expected = list(states)
        ahead: asyncio.Task[list[ChunkAnswer]] | None = None

        def request(iteration: int) -> asyncio.Task[list[ChunkAnswer]]:
            keys = [ChunkKey(seed=0, purpose="train", shard=at, iteration=iteration) for at in range(faults.shards)]
            requests = [ChunkRequest(key=key, steps=1, state=states[key.shard]) for key in keys]
            return asyncio.create_task(chunks.run(max(0, iteration - faults.lag), requests))

        await publish(chunks, 0)
        for iteration in range(faults.iterations):
            running = ahead or request(iteration)
            if faults.happens():  # a controller that stops waiting, and asks again
                await asyncio.wait({running}, timeout=faults.chunk_s)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                running = request(iteration)
            answers = await running
            version = max(0, iteration - faults.lag)
            for shard, answer in enumerate(answers):
                key = ChunkKey(seed=0, purpose="train", shard=shard, iteration=iteration)
                data = computed(version, ChunkRequest(key=key, steps=1, state=expected[shard]))
                require(answer.key == key and answer.version == version, f"{key} was answered by {answer.key}")
                require(answer.state["chain"].data == data, f"the states of shard {shard} are no chain")
                expected[shard] = {"chain": Array(dtype="|u1", shape=(8,), data=data)}
                require(faults.answered[shard, iteration] > 0, f"{key} was never computed")
            states = [answer.state for answer in answers]
            ahead = request(iteration + 1) if faults.lag and iteration + 1 < faults.iterations else None
            await asyncio.sleep(faults.random.uniform(0, faults.chunk_s))
            await publish(chunks, iteration + 1)
        require(not chunks._open, "chunks are open after the end")
        require(not faults.violation, faults.violation)
        return clock.now()


async def publish(chunks: FleetChunks, number: int) -> None:
    await chunks.publish(PolicyVersion(number=number, digest=str(number)), {})


def simulate_chunk_faults(seed: int) -> Outcome:
    faults, violation, virtual_s = ChunkFaults(seed), "", 0.0

    async def ends() -> float:
        async with asyncio.timeout(LONGEST_S):
            return await train(faults)

    try:
        virtual_s = run_virtual(ends())
    except Violation as found:
        violation = str(found)
    except Deadlock:
        violation = "deadlock: all tasks wait and no timer is set"
    except Exception as error:  # noqa: BLE001 - any exception is a finding
        violation = f"the controller raised {error!r}"
    answered = sum(faults.answered.values())
    digest = hashlib.blake2b(repr((violation, virtual_s, answered)).encode(), digest_size=16).hexdigest()
    return Outcome(
        seed=seed,
        violation=violation,
        lives=faults.leases,
        looks=answered,
        virtual_s=virtual_s,
        events=answered,
        digest=digest,
    )
