"""A simulated machine with faults: its lease, its worker, and the connection to the controller."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tests.doubles.costs import ConstantEngine
from tests.fault_simulation.corruptions import CORRUPTIONS, Corruption, corrupted
from tests.fault_simulation.scenario import BREAKING, MachineFault, MachinePlan
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
    LogprobBuffer,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    WorkerReport,
)
from tidemill.sim.simulated_engine import EPSILON_S
from tidemill.sim.simulated_worker import SimulatedWorker

STILL_S = 0.5
"""Delay of a report from a lost worker, or until the end of its lease has been read."""


class Surroundings(Protocol):
    """The interface between a machine and its world."""

    def after(self, seconds: float, happens: Callable[[], object]) -> None: ...

    def tell(self, event: LeaseEvent) -> None:
        """Send an event of the provider."""

    def arrives_late(self, report: WorkerReport) -> bool:
        """Deliver a report of a worker that the fleet has forgotten; False if it has not yet."""


class Machine:
    def __init__(self, plan: MachinePlan, surroundings: Surroundings, rng: random.Random) -> None:
        self.plan, self.rng = plan, rng
        self.lease_id = f"lease-{plan.name}"
        self.line: Connection | None = None
        self.computes_wrongly = any(fault.kind == "computes wrongly" for fault in plan.faults)
        self.applied: list[str] = []
        self._world, self._broken = surroundings, ""
        self._up = asyncio.Event()
        self._up.set()

    @property
    def breaking(self) -> bool:
        """Whether attempts at its samples may fail."""
        return any(fault.kind in BREAKING for fault in self.plan.faults)

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
        for fault in self.plan.faults:
            self._world.after(fault.at_s, lambda fault=fault: self._apply(fault))  # type: ignore[misc]

    def _tell(self, event: LeaseEvent) -> None:
        times = [self.plan.told_late_s] + [self.plan.told_late_s + 0.7] * self.plan.told_twice
        for seconds in times:
            self._world.after(seconds, lambda: self._world.tell(event))

    async def boot(self, engine: ConstantEngine, worker: Callable[[ConstantEngine], SimulatedWorker]) -> Connection:
        await asyncio.sleep(self.plan.boot_s)
        await self._up.wait()
        if self._broken:
            raise WorkerLost(self._broken)
        slow = msgspec.structs.replace(engine, step_s=engine.step_s * self.plan.slowness)
        self.line = Connection(worker(slow), self, self._up)
        return self.line

    def _apply(self, fault: MachineFault) -> None:
        self.applied.append(fault.kind)
        worker = self.line.inner if self.line is not None else None
        if fault.kind == "taken":
            self._taken()
        elif fault.kind in ("noticed", "self_noticed"):
            self._warned(fault)
        elif fault.kind == "dies":
            self._broken = "its process was killed"
            if worker is not None:
                worker.kill()
        elif fault.kind == "hangs":
            self._up.clear()
            self._world.after(fault.lasts_s, self._up.set)
        elif self.line is not None:
            self.line.apply(fault)

    def _taken(self) -> None:
        self._broken = "its machine was evicted"
        self._tell(LeaseEnded(lease_id=self.lease_id, cause="evicted"))

    def _warned(self, fault: MachineFault) -> None:
        seconds = min(fault.lasts_s, 10.0)
        deadline_s = LoopClock().now() + seconds
        if fault.kind == "noticed":
            self._tell(LeaseNoticed(lease_id=self.lease_id, deadline_s=deadline_s))
        elif self.line is not None:
            self.line.inner.notice(seconds)
        self._world.after(seconds, self._taken)

    def late(self, report: WorkerReport) -> None:
        """Deliver a corrupted report after the end of the lease; the controller must ignore it."""

        def arrives() -> None:
            if not self._world.arrives_late(corrupted(report)):
                self.late(report)

        self._world.after(STILL_S, arrives)


class Connection:
    """Implements `core.protocols.Worker`: delays, loses, repeats and reorders messages of a worker."""

    def __init__(self, inner: SimulatedWorker, machine: Machine, up: asyncio.Event) -> None:
        self.inner = inner
        self.killed = False
        self._machine, self._rng, self._up = machine, machine.rng, up
        self._arriving: list[tuple[float, int, WorkerReport]] = []  # heap of (time, serial, report)
        self._serial, self._last_s = 0, 0.0
        self._delay_s = self._disorder_s = 0.0
        self._share: dict[str, float] = {}  # share of affected messages by fault
        self._corruption: Corruption = lambda report: report
        self._crash = False

    def apply(self, fault: MachineFault) -> None:
        if fault.kind == "crashes":
            self._crash = True
            self.inner.flush()
        elif fault.kind == "slows":
            engine, now_s = self.inner.engine, LoopClock().now()
            assert isinstance(engine.costs, ConstantEngine), "engines of fault simulation have constant costs"
            engine.advance(now_s)
            engine.costs = msgspec.structs.replace(engine.costs, step_s=10 * engine.costs.step_s)
        elif fault.kind == "delays":
            self._delay_s = min(fault.lasts_s, 5.0)
        elif fault.kind == "reorders":
            self._disorder_s = min(fault.lasts_s, 5.0)
        elif fault.kind == "corrupts":
            self._corruption = [*CORRUPTIONS.values()][fault.corruption % len(CORRUPTIONS)]
        else:
            self._share[fault.kind] = fault.share

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

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        await self._up.wait()
        return await self.inner.run_probe(token_ids)

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
        return self._corruption(report) if report.deltas else report

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
