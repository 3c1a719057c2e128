"""A machine that things happen to: its lease, the worker on it, and the line between that worker and the controller."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tests.fault_simulation.corruptions import LIES, Lie, spoiled
from tests.fault_simulation.scenario import BREAKING, Fate, MachinePlan
from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import LoopClock
from tidemill.core.records import (
    GenerateRequest,
    Lease,
    LeaseEnded,
    LeaseEvent,
    LeaseGranted,
    LeaseNoticed,
    Loaded,
    PolicyVersion,
    SampleId,
    WorkerReport,
)
from tidemill.sim.costs import ConstantEngine
from tidemill.sim.simulated_engine import EPSILON_S
from tidemill.sim.simulated_worker import SimulatedWorker

STILL_S = 0.5
"""A letter of a worker that is gone arrives so much later, or when the end of its lease has been read."""


class Surroundings(Protocol):
    """What a machine needs of its world."""

    def after(self, seconds: float, happens: Callable[[], object]) -> None: ...

    def tell(self, event: LeaseEvent) -> None:
        """Its provider's words."""

    def arrives_late(self, report: WorkerReport) -> bool:
        """A letter of a worker that the fleet has forgotten; False as long as it has not."""


class Machine:
    def __init__(self, plan: MachinePlan, surroundings: Surroundings, rng: random.Random) -> None:
        self.plan, self.rng = plan, rng
        self.lease_id = f"lease-{plan.name}"
        self.line: Line | None = None
        self.computes_wrongly = any(fate.kind == "computes wrongly" for fate in plan.fates)
        self.befallen: list[str] = []
        self._world, self._broken = surroundings, ""
        self._up = asyncio.Event()
        self._up.set()

    @property
    def breaking(self) -> bool:
        """Whether attempts at its samples may fail."""
        return any(fate.kind in BREAKING for fate in self.plan.fates)

    def offer(self) -> None:
        self._world.after(self.plan.granted_s, self._granted)

    def _granted(self) -> None:
        lease = Lease(
            lease_id=self.lease_id,
            worker_id=f"spot-{self.plan.name}",
            kind="preemptible",
            price_usd_per_hour=1.0,
            start_s=LoopClock().now(),
        )
        self._tell(LeaseGranted(lease=lease))
        for fate in self.plan.fates:
            self._world.after(fate.at_s, lambda fate=fate: self._befalls(fate))  # type: ignore[misc]

    def _tell(self, event: LeaseEvent) -> None:
        times = [self.plan.told_late_s] + [self.plan.told_late_s + 0.7] * self.plan.told_twice
        for seconds in times:
            self._world.after(seconds, lambda: self._world.tell(event))

    async def boot(self, engine: ConstantEngine, worker: Callable[[ConstantEngine], SimulatedWorker]) -> Line:
        await asyncio.sleep(self.plan.boot_s)
        await self._up.wait()
        if self._broken:
            raise WorkerLost(self._broken)
        slow = msgspec.structs.replace(engine, step_s=engine.step_s * self.plan.slowness)
        self.line = Line(worker(slow), self, self._up)
        return self.line

    def _befalls(self, fate: Fate) -> None:
        self.befallen.append(fate.kind)
        worker = self.line.inner if self.line is not None else None
        if fate.kind == "taken":
            self._taken()
        elif fate.kind in ("warned", "told"):
            self._warned(fate)
        elif fate.kind == "dies":
            self._broken = "its process was killed"
            if worker is not None:
                worker.kill()
        elif fate.kind == "hangs":
            self._up.clear()
            self._world.after(fate.lasts_s, self._up.set)
        elif self.line is not None:
            self.line.befalls(fate)

    def _taken(self) -> None:
        self._broken = "its machine was taken"
        self._tell(LeaseEnded(lease_id=self.lease_id, cause="taken away"))

    def _warned(self, fate: Fate) -> None:
        seconds = min(fate.lasts_s, 10.0)
        deadline_s = LoopClock().now() + seconds
        if fate.kind == "warned":
            self._tell(LeaseNoticed(lease_id=self.lease_id, deadline_s=deadline_s))
        elif self.line is not None:
            self.line.inner.notice(seconds)
        self._world.after(seconds, self._taken)

    def late(self, report: WorkerReport) -> None:
        """A report whose reader is gone; should anybody still look at it, it is wrong."""

        def arrives() -> None:
            if not self._world.arrives_late(spoiled(report)):
                self.late(report)

        self._world.after(STILL_S, arrives)


class Line:
    """Implements `core.protocols.Worker`: between the controller and a worker, where messages get late, lost, repeated
    and out of order."""

    def __init__(self, inner: SimulatedWorker, machine: Machine, up: asyncio.Event) -> None:
        self.inner = inner
        self.killed = False
        self._machine, self._rng, self._up = machine, machine.rng, up
        self._arriving: list[tuple[float, int, WorkerReport]] = []  # a heap: when, in which order, what
        self._serial, self._last_s = 0, 0.0
        self._delay_s = self._disorder_s = 0.0
        self._share: dict[str, float] = {}  # of messages that are hit, by what hits them
        self._lie: Lie = lambda report: report
        self._crash = False

    def befalls(self, fate: Fate) -> None:
        if fate.kind == "crashes":
            self._crash = True
            self.inner.flush()
        elif fate.kind == "slows":
            engine, now_s = self.inner.engine, LoopClock().now()
            assert isinstance(engine.costs, ConstantEngine), "engines of fault simulation have constant costs"
            engine.advance(now_s)
            engine.costs = msgspec.structs.replace(engine.costs, step_s=10 * engine.costs.step_s)
        elif fate.kind == "delays":
            self._delay_s = min(fate.lasts_s, 5.0)
        elif fate.kind == "reorders":
            self._disorder_s = min(fate.lasts_s, 5.0)
        elif fate.kind == "lies":
            self._lie = [*LIES.values()][fate.lie % len(LIES)]
        else:
            self._share[fate.kind] = fate.share

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await self._up.wait()
        await self.inner.submit([request for request in requests if not self._hit("forgets")])

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await self._up.wait()
        await self.inner.abort(sample_ids)

    async def load(self, version: PolicyVersion) -> Loaded:
        await self._up.wait()
        loaded = await self.inner.load(version)
        await self._up.wait()
        return loaded

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        deadline_s = LoopClock().now() + timeout_s
        while True:
            left_s = deadline_s - LoopClock().now()
            if left_s <= EPSILON_S or not await self._is_up(left_s):
                return None
            now_s = LoopClock().now()
            if self._arriving and self._arriving[0][0] <= now_s + EPSILON_S:
                return self._read(heapq.heappop(self._arriving)[2])
            next_s = min(deadline_s, self._arriving[0][0]) if self._arriving else deadline_s
            report = await self.inner.next_report(max(0.0, next_s - now_s))
            if report is not None:
                self._send(report)

    async def _is_up(self, timeout_s: float) -> bool:
        if self._up.is_set():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    def _send(self, report: WorkerReport) -> None:
        if self._hit("loses"):
            return
        for _ in range(2 if self._hit("repeats") else 1):
            now_s = LoopClock().now()
            arrives_s = now_s + self._rng.uniform(0, self._delay_s) if self._delay_s else now_s
            self._last_s = arrives_s = max(self._last_s, arrives_s)
            if self._disorder_s:
                arrives_s += self._rng.uniform(0, self._disorder_s)
            heapq.heappush(self._arriving, (arrives_s, self._serial, report))
            self._serial += 1

    def _read(self, report: WorkerReport) -> WorkerReport:
        if self._crash:
            raise ValueError("engine on fire")
        return self._lie(report) if report.deltas else report

    def _hit(self, what: str) -> bool:
        share = self._share.get(what, 0.0)
        return share > 0 and self._rng.random() < share

    async def close(self) -> None:
        await self.inner.close()

    def kill(self) -> None:
        self.killed = True
        self.inner.kill()
        for _, _, report in self._arriving:
            self._machine.late(report)
        self._arriving.clear()
