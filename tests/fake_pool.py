"""A pool of workers in virtual time: machines that come and go on cue, slow pulls, engines that hang or lie."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.fake_engine import FakeCompute, FakeEngine
from tests.fake_session import FakeTelemetry, FakeTrainer, Session
from tidemill.config.pool import FleetConfig
from tidemill.controller.fleet import Fleet
from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import LoopClock, Worker
from tidemill.core.records import (
    Lease,
    LeaseEnded,
    LeaseEvent,
    LeaseGranted,
    LeaseNoticed,
    PolicyVersion,
    Pulled,
    WeightManifest,
    pack_logprobs,
    pack_tokens,
)
from tidemill.rollout.worker import EngineWorker

PROBE = pack_tokens([1, 2, 3])
PROBE_LOGPROBS = pack_logprobs([-0.5, -1.0])
NOWHERE = PolicyVersion(number=-1, digest="none")


def granted(name: str, at_s: float = 0.0) -> tuple[float, LeaseEvent]:
    lease = Lease(
        lease_id=f"lease-{name}",
        worker_id=f"spot-{name}",
        kind="preemptible",
        price_usd_per_hour=3.6,
        start_s=at_s,
    )
    return at_s, LeaseGranted(lease=lease)


def noticed(name: str, at_s: float, deadline_s: float) -> tuple[float, LeaseEvent]:
    return at_s, LeaseNoticed(lease_id=f"lease-{name}", deadline_s=deadline_s)


def ended(name: str, at_s: float) -> tuple[float, LeaseEvent]:
    return at_s, LeaseEnded(lease_id=f"lease-{name}", cause="taken away")


class ScriptedProvider:
    """Says what its script has for each moment."""

    def __init__(self, script: Iterable[tuple[float, LeaseEvent]]) -> None:
        self._script = deque(sorted(script, key=lambda line: line[0]))
        self.released: list[str] = []
        self.wanted: list[int] = []

    def want(self, workers: int) -> None:
        self.wanted.append(workers)

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        now_s = asyncio.get_running_loop().time()
        due_s = self._script[0][0] if self._script else float("inf")
        if due_s > now_s + timeout_s:
            await asyncio.sleep(timeout_s)
            return None
        await asyncio.sleep(max(0.0, due_s - now_s))
        return self._script.popleft()[1]

    async def release(self, lease_id: str) -> None:
        self.released.append(lease_id)

    async def close(self) -> None:
        pass


class FakeSource:
    """Takes `pull_s` to fetch a version."""

    def __init__(self, publisher: FakePublisher, pull_s: float) -> None:
        self.publisher, self.pull_s = publisher, pull_s

    async def prepare(self, version: PolicyVersion) -> Pulled:
        await asyncio.sleep(self.pull_s)
        return Pulled(manifest=self.publisher.manifests[version.number], nbytes=100, full=True, pull_s=0.1, retries=0)

    def swap(self, pulled: Pulled) -> None:
        pass

    def close(self) -> None:
        pass


class FakePublisher:
    def __init__(self) -> None:
        self.manifests: dict[int, WeightManifest] = {}

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        await asyncio.sleep(0.05)
        manifest = WeightManifest(
            version=version,
            digest=version.digest,
            nbytes=100,
            tensors=(),
            probe_ids=PROBE,
            probe_logprobs=PROBE_LOGPROBS,
        )
        self.manifests[version.number] = manifest
        return manifest

    async def close(self) -> None:
        pass


class PoolEngine(FakeEngine):
    """One of many; it is probed after every swap."""

    probe_logprobs = PROBE_LOGPROBS

    def probe(self, token_ids: bytes) -> bytes:
        assert token_ids == PROBE
        return self.probe_logprobs


@dataclass
class FakeHost:
    """Starts workers with fake engines; `prepare` may spoil one before it is used."""

    publisher: FakePublisher
    boot_s: float = 0.2
    pull_s: float = 0.3
    slots: int = 3
    tick_s: float = 0.1
    per_poll: int = 2
    source_type: type[FakeSource] = FakeSource
    prepare: Callable[[Lease, PoolEngine], None] = lambda lease, engine: None
    engines: dict[str, PoolEngine] = field(default_factory=dict)
    workers: dict[str, EngineWorker] = field(default_factory=dict)

    async def start(self, lease: Lease) -> Worker:
        await asyncio.sleep(self.boot_s)
        engine = PoolEngine(NOWHERE, slots=self.slots, per_poll=self.per_poll)
        self.prepare(lease, engine)
        self.engines[lease.lease_id] = engine
        worker = EngineWorker(
            engine,
            FakeCompute(self.tick_s),
            clock=LoopClock(),
            tick_s=self.tick_s,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            source=self.source_type(self.publisher, self.pull_s),
        )
        self.workers[lease.lease_id] = worker
        return worker

    async def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()


class BrokenHost(FakeHost):
    """Its machines never come up: they say so, or say nothing."""

    silent = False

    async def start(self, lease: Lease) -> Worker:
        if self.silent:
            await asyncio.sleep(10**9)
        raise WorkerLost("no such machine", hint="try another zone")


@dataclass
class PoolSession(Session):
    """A session whose samples are generated by whoever is there."""

    script: Sequence[tuple[float, LeaseEvent]] = ()
    config: FleetConfig = field(default_factory=FleetConfig)
    seeding_worker: bool = True  # whether the reserved side has an engine at all
    host_type: type[FakeHost] = FakeHost

    def __post_init__(self) -> None:
        super().__post_init__()
        self.publisher = FakePublisher()
        self.host = self.host_type(self.publisher, slots=self.slots)
        self.provider = ScriptedProvider(self.script)
        self.fleet = Fleet(
            self.worker if self.seeding_worker else None,
            slots=self.slots,
            clock=LoopClock(),
            telemetry=self.telemetry,
            config=self.config,
            timeouts=self.timeouts,
            provider=self.provider,
            host=self.host,
            publisher=self.publisher,
            needs_logprobs=self.spec.algorithm.needs_rollout_logprobs,
        )


def trained(session: Session) -> object:
    """Everything the trainer learned from, token by token, and the weights that came of it."""
    trainer, telemetry = session.trainer, session.telemetry
    assert isinstance(trainer, FakeTrainer)
    assert isinstance(telemetry, FakeTelemetry)
    return trainer.state
