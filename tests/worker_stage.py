"""A worker with a fake engine in virtual time, requests, and a slow weight source."""

from __future__ import annotations

import asyncio

from tests.doubles.engine import FakeCompute, FakeEngine
from tests.doubles.samples import SAMPLING, make_id, make_prompt
from tidemill.core.protocols import LoopClock, WeightSource
from tidemill.core.records import GenerateRequest, PolicyVersion, Pulled, TokenDelta, WeightManifest, pack_tokens
from tidemill.rollout.worker import EngineWorker

V0, V1 = PolicyVersion(number=0, digest="v0"), PolicyVersion(number=1, digest="v1")


def request(name: str, index: int = 0, version: int = 0) -> GenerateRequest:
    return GenerateRequest(
        sample_id=make_id(name, index),
        lease_id="lease",
        attempt=1,
        prompt_ids=make_prompt(name).token_ids,
        sampling=SAMPLING,
        exact_version=version,
    )


class Stage:
    def __init__(self) -> None:
        self.engine = FakeEngine(V0)
        self.compute = FakeCompute(0.1)
        self.polls, self.fail_at = 0, 0
        self.engine.on_poll = self._count
        self.worker = self.make_worker()

    def make_worker(self, heartbeat_s: float = 1e6, source: WeightSource | None = None) -> EngineWorker:
        """Without heartbeats by default."""
        return EngineWorker(
            self.engine,
            self.compute,
            clock=LoopClock(),
            tick_s=0.1,
            worker_id="w1",
            lease_id="lease",
            source=source,
            heartbeat_s=heartbeat_s,
        )

    def _count(self) -> None:
        self.polls += 1
        if self.polls == self.fail_at:
            raise ValueError("engine on fire")

    async def deltas(self) -> list[TokenDelta]:
        """All deltas until the worker has no more reports."""
        found: list[TokenDelta] = []
        while report := await self.worker.next_report(5.0):
            assert report.lease_id == "lease"
            found += report.deltas
        return found


PROBE = pack_tokens([3, 1, 4, 1, 5])


class SlowSource:
    """A pull takes `seconds`; records the versions of swaps."""

    def __init__(self, engine: FakeEngine, seconds: float = 1.0) -> None:
        self.engine, self.seconds = engine, seconds
        self.prepared: list[PolicyVersion] = []
        self.swapped: list[tuple[PolicyVersion, PolicyVersion]] = []  # (version of the engine, new version)
        self.closed = 0
        self.fault: Exception | None = None

    async def prepare(self, version: PolicyVersion) -> Pulled:
        await asyncio.sleep(self.seconds)
        if self.fault is not None:
            raise self.fault
        self.prepared.append(version)
        manifest = WeightManifest(version=version, digest=version.digest, nbytes=100, tensors=(), probe_ids=PROBE)
        return Pulled(manifest=manifest, nbytes=10, full=False, pull_s=self.seconds, retries=2)

    def swap(self, pulled: Pulled) -> None:
        self.swapped.append((self.engine.version, pulled.manifest.version))

    def close(self) -> None:
        self.closed += 1
