"""Faulty machines in virtual time: real controller, workers, weights and pulls with deterministic engines.

Generated tokens are a function of the pulled bytes, so a wrong byte gives wrong tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from tests.doubles.engine import FakeCompute, FakeEngine, FakeFrozenScorer
from tests.doubles.provider import EventProvider
from tests.doubles.samples import number
from tests.doubles.session import Session
from tests.doubles.transport import FaultyTransport
from tidemill.config.pool import FleetConfig
from tidemill.controller.fleet import Fleet
from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import LoopClock, MachineGuard, Worker
from tidemill.core.records import (
    GenerateRequest,
    Lease,
    LeaseEnded,
    LeaseGranted,
    LeaseNoticed,
    Loaded,
    LogprobBuffer,
    PolicyVersion,
    Pulled,
    SampleId,
    TensorEntry,
    TokenBuffer,
    WeightManifest,
    WorkerReport,
    pack_tokens,
)
from tidemill.rollout.worker import EngineWorker
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Blob, Snapshot, allocate, part_sums
from tidemill.weights.store import WeightStore

T = TypeVar("T")
Redelivery = Callable[[list[WorkerReport]], list[WorkerReport]]
Corruption = Callable[[WorkerReport], WorkerReport]

NOWHERE = PolicyVersion(number=-1, digest="none")
PROBE = pack_tokens([1, 2, 3])
NAME_BYTES = 16
LAYOUT = (
    TensorEntry(name="name", dtype="float32", shape=(4,), offset=0, nbytes=NAME_BYTES, checksum=0),
    TensorEntry(name="rest", dtype="float32", shape=(240,), offset=64, nbytes=960, checksum=0),
)
BOOT_S, TICK_S, GRACE_S, FETCH_S = 0.3, 0.1, 1.2, 0.15


def weights_of(version: PolicyVersion) -> Blob:
    """Weights that contain the version's digest; one other element in twenty differs between versions."""
    blob = allocate(LAYOUT[-1].offset + LAYOUT[-1].nbytes)
    blob[:] = np.arange(len(blob)) % 251
    blob[:NAME_BYTES] = np.frombuffer(version.digest.encode().ljust(NAME_BYTES), np.uint8)
    for at in range(12):
        blob[64 + number(version.digest, at) % 960] ^= 1
    return blob


def tensor_bytes(snapshot: Blob) -> bytes:
    """The bytes of all tensors, without padding."""
    return b"".join(bytes(snapshot[entry.offset : entry.offset + entry.nbytes]) for entry in LAYOUT)


class Publisher:
    """A publish takes `seconds`."""

    def __init__(self, store: WeightStore) -> None:
        self.store, self.seconds = store, 0.05

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        latest = self.store.latest
        if latest is not None and latest.version == version:
            return latest
        await asyncio.sleep(self.seconds)
        await self.store.make_room()
        said = FakeEngine(version).probe(PROBE)
        return await self.store.publish(version, LAYOUT, weights_of(version), probe_ids=PROBE, probe_logprobs=said)

    async def close(self) -> None:
        await self.store.close()


class Processor(FakeCompute):
    """The processor of a machine; `runs` can be cleared to stop it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.runs = asyncio.Event()
        self.runs.set()

    async def run(self, function: Callable[[], T]) -> T:
        async with self._turn:
            await asyncio.sleep(self.seconds)
            await self.runs.wait()
            return function()


class ObservedPulls:
    """A `WeightSource` that reports the start of each pull to its machine, and sums of the weights in its memory."""

    def __init__(self, machine: Machine, engine: WeightReadingEngine, puller: Puller) -> None:
        self._machine, self._engine, self._puller, self._pulls = machine, engine, puller, 0
        self.expected: tuple[int, ...] = ()

    async def prepare(self, version: PolicyVersion) -> Pulled:
        self._machine.reached("later pull" if self._pulls else "first pull")
        self._pulls += 1
        return await self._puller.prepare(version)

    def swap(self, pulled: Pulled) -> None:
        self._puller.swap(pulled, self._engine.bind)
        self.expected = pulled.manifest.part_sums
        self._machine.flipped = -1

    def part_sum(self, number: int) -> int:
        return part_sums(LAYOUT, self._engine.snapshot)[number] + (number == self._machine.flipped)

    def close(self) -> None:
        self._puller.close()


class WeightReadingEngine(FakeEngine):
    """Reads the digest that determines its tokens from the weights, not from the version."""

    snapshot: Blob

    def bind(self, parts: Sequence[Snapshot]) -> None:
        self.snapshot = parts[0].buffer

    def load(self, version: PolicyVersion) -> None:
        right = tensor_bytes(self.snapshot) == tensor_bytes(weights_of(version))
        digest = bytes(self.snapshot[:NAME_BYTES]).decode(errors="replace").strip()
        super().load(PolicyVersion(number=version.number, digest=digest if right else "wrong bytes"))


class Machine:
    """A lease and its worker; `at` schedules a fault at a stage of its life."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.lease_id = f"lease-{name}"
        self.processor = Processor(TICK_S)
        self.worker: Connection | None = None
        self.engine: WeightReadingEngine | None = None
        self.broken: Exception | None = None  # raised by a start in progress
        self.ended = self.noticed = False
        self.flipped = -1  # part of its weights
        self._plans: dict[str, tuple[float, Callable[[Machine], None]]] = {}

    def at(self, stage: str, after_s: float, happens: Callable[[Machine], None]) -> None:
        self._plans[stage] = after_s, happens

    def reached(self, stage: str) -> None:
        if (plan := self._plans.pop(stage, None)) is not None and not self.ended:
            self.world.after(plan[0], lambda: plan[1](self))

    @property
    def spared(self) -> bool:
        """Whether a scheduled stage was never reached."""
        return bool(self._plans)

    def grant(self) -> None:
        now_s = asyncio.get_running_loop().time()
        lease = Lease(
            lease_id=self.lease_id,
            worker_id=f"spot-{self.name}",
            kind="preemptible",
            price_usd_per_hour=1.0,
            start_s=now_s,
        )
        self.world.machines[self.lease_id] = self
        self.world.provider.tell(LeaseGranted(lease=lease))

    async def boot(self) -> None:
        self.reached("boot")
        await asyncio.sleep(BOOT_S)
        await self.processor.runs.wait()
        if self.broken is not None:
            raise self.broken

    # Faults.

    def evict(self) -> None:
        self.ended = True
        self.world.provider.tell(LeaseEnded(lease_id=self.lease_id, cause="evicted"))

    def notice(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self.world.provider.tell(LeaseNoticed(lease_id=self.lease_id, deadline_s=now_s + GRACE_S))
        self.noticed = True
        self.reached("notice")
        self.world.after(GRACE_S, self.evict)

    def die(self) -> None:
        self.broken = WorkerLost("its process was killed")
        if self.worker is not None:
            self.worker.inner.kill()

    def crash(self) -> None:
        self.broken = ValueError("engine on fire")
        if self.engine is not None:
            self.engine.on_poll = self._burn

    def _burn(self) -> None:
        raise ValueError("engine on fire")

    def stop(self) -> None:
        self.processor.runs.clear()
        if self.worker is not None:
            self.worker.up.clear()

    def resume(self) -> None:
        self.processor.runs.set()
        if self.worker is not None:
            self.worker.restore(list)

    def stop_for(self, seconds: float) -> None:
        self.stop()
        self.world.after(seconds, self.resume)

    def flip_a_bit(self, part: int) -> None:
        """Of its weights; it generates other tokens until it loads a version."""
        if self.engine is not None:
            self.flipped = part
            self.engine.version = PolicyVersion(number=self.engine.version.number, digest="wrong bit")

    def slow_down(self) -> None:
        self.processor.seconds *= 10

    def disconnect(self, seconds: float, redelivery: Redelivery) -> None:
        """Disconnect it for `seconds`; then all messages are delivered as `redelivery` orders them."""
        if self.worker is not None:
            self.worker.up.clear()
            self.world.after(seconds, partial(self.worker.restore, redelivery))

    def corrupt_reports(self, corruption: Corruption) -> None:
        if self.worker is not None:
            self.worker.corruption = corruption


class Connection:
    """The connection between the controller and a worker. A kill during a disconnection takes effect afterwards."""

    def __init__(self, inner: EngineWorker, machine: Machine) -> None:
        self.inner, self.machine = inner, machine
        self.up = asyncio.Event()
        self.up.set()
        self.corruption: Corruption = lambda report: report
        self.killed = False
        self._arrived: deque[WorkerReport] = deque()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await self.up.wait()
        await self.inner.submit(requests)
        self.machine.reached("decode")

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await self.up.wait()
        if self.machine.noticed:
            self.machine.reached("drain")
        await self.inner.abort(sample_ids)

    async def load(self, version: PolicyVersion) -> Loaded:
        await self.up.wait()
        loaded = await self.inner.load(version)
        await self.up.wait()
        return loaded

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        await self.up.wait()
        return await self.inner.run_probe(token_ids)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.up.wait()
        except TimeoutError:
            return None
        report = self._arrived.popleft() if self._arrived else await self.inner.next_report(timeout_s)
        return self.corruption(report) if report is not None and report.deltas else report

    def restore(self, redelivery: Redelivery) -> None:
        self.machine.world.spawn(self._restore(redelivery))

    async def _restore(self, redelivery: Redelivery) -> None:
        reports: list[WorkerReport] = []
        try:
            while (report := await self.inner.next_report(0.0)) is not None:
                reports.append(report)
        except WorkerLost:
            return
        reports = redelivery(reports)
        self.up.set()
        if self.killed:
            self.machine.world.arrives_late(reports)
            self.inner.kill()
        else:
            self._arrived.extend(reports)

    async def close(self) -> None:
        await self.inner.close()

    def kill(self) -> None:
        self.killed = True
        if self.up.is_set():
            self.inner.kill()


@dataclass
class World(Session):
    """A session with the machines and faults that `setting` schedules when the loop runs."""

    setting: Callable[[World], None] = lambda world: None
    config: FleetConfig = field(default_factory=FleetConfig)
    reserved_engine: bool = True
    frozen_scorer: FakeFrozenScorer | None = field(default_factory=FakeFrozenScorer)
    watch: MachineGuard | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.machines: dict[str, Machine] = {}
        self.provider = EventProvider()
        self.transport = FaultyTransport(zero_copy=False)
        self.transport.delay_s = FETCH_S
        self.publisher = Publisher(WeightStore(self.transport, compute=FakeCompute()))
        self.late = 0  # reports of workers with ended leases
        self._jobs: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self.fleet = Fleet(
            self.worker if self.reserved_engine else None,
            slots=self.slots,
            clock=LoopClock(),
            telemetry=self.telemetry,
            config=self.config,
            timeouts=self.timeouts,
            provider=self.provider,
            host=self,
            publisher=self.publisher,
            machines=self.watch,
        )

    async def live(self) -> None:
        """Train with all scheduled faults; check that no task remains."""
        self.setting(self)
        try:
            async with asyncio.timeout(LONG_S):
                self.result = await self.run()
        finally:
            for timer in self._timers:
                timer.cancel()
            for job in self._jobs:
                job.cancel()
            for machine in self.machines.values():
                if machine.worker is not None:
                    machine.worker.inner.kill()
            for _ in range(5):
                await asyncio.sleep(0)
        assert {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}} == set()

    async def start(self, lease: Lease) -> Worker:
        """Implements `WorkerHost.start`."""
        machine = self.machines[lease.lease_id]
        await machine.boot()
        machine.engine = engine = WeightReadingEngine(NOWHERE, slots=self.slots)
        puller = Puller(self.transport, machine.processor, clock=LoopClock(), timeout_s=60.0)
        pulls = ObservedPulls(machine, engine, puller)
        inner = EngineWorker(
            engine,
            machine.processor,
            clock=LoopClock(),
            tick_s=TICK_S,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            source=pulls,
            check=pulls if self.watch is not None else None,
            timer=lambda: 0.0,  # summing takes no time
        )
        machine.worker = Connection(inner, machine)
        return machine.worker

    async def close(self) -> None:
        pass

    def after(self, seconds: float, happens: Callable[[], object]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, happens))

    def spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    def arrives_late(self, reports: Sequence[WorkerReport]) -> None:
        """Deliver corrupted reports of workers whose leases have ended; the controller must ignore them."""
        spoiled = [spoil(report) for report in reports]
        if self.fleet._mailbox is not None:
            self.late += sum(bool(report.deltas) for report in spoiled)
            self.fleet._mailbox.put_reports(spoiled)

    @property
    def present(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if not machine.ended]


LONG_S = 3600.0
"""Virtual seconds after which a run counts as hung."""


def spoil(report: WorkerReport) -> WorkerReport:
    """Change every token and finish every sample."""
    replace = msgspec.structs.replace
    deltas = [
        replace(delta, token_ids=bytes(byte ^ 1 for byte in delta.token_ids), finish="stop") for delta in report.deltas
    ]
    return replace(report, deltas=tuple(deltas))


def shuffled(seed: int) -> Redelivery:
    def redeliver(reports: list[WorkerReport]) -> list[WorkerReport]:
        return random.Random(seed).sample(reports, len(reports))

    return redeliver


def repeated(reports: list[WorkerReport]) -> list[WorkerReport]:
    return [copy for report in reports for copy in (report, report)]
