"""Training sessions in virtual time with deterministic components, with or without a pool of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.doubles.engine import FakeCompute, FakeEngine, FakeFrozenScorer
from tests.doubles.environments import LIMITS, FakeEnvironments
from tests.doubles.guard import FakeGuard
from tests.doubles.journal import MemoryJournal, PowerCut
from tests.doubles.provider import ScriptedProvider
from tests.doubles.samples import MAX_NEW, FakeCodec, FakePrompts, digest_of, logprobs_of, number
from tidemill.config.pool import FleetConfig
from tidemill.config.schema import RunSpec
from tidemill.controller.fleet import Fleet
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.run import TrainingRun
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import LoopClock, MachineGuard, Worker
from tidemill.core.records import (
    Completion,
    FleetRow,
    Group,
    Lease,
    LeaseEnded,
    LeaseEvent,
    LeaseGranted,
    LeaseNoticed,
    LogprobBuffer,
    PolicyVersion,
    Prompt,
    Pulled,
    Reward,
    SampleId,
    StepMetrics,
    Trajectory,
    WeightManifest,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from tidemill.rollout.worker import EngineWorker
from tidemill.telemetry.control import RunControl


@dataclass
class Disk:
    """The durable state."""

    journal: bytes = b""
    checkpoints: dict[int, TrainerState] = field(default_factory=dict)
    rollbacks: int = 0  # carried out


@dataclass(frozen=True)
class TrainerState:
    """The weights: every trained batch, group by group."""

    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(number=0, digest="init"))
    history: tuple[tuple[object, ...], ...] = ()


def seen(group: Group) -> tuple[object, ...]:
    """All inputs of a group to training."""
    return (
        group.position,
        group.prompt_id,
        tuple(
            (
                t.sample_id,
                tuple(unpack_tokens(t.completion_ids)),
                t.rollout_logprobs,
                t.finish,
                t.text,
                t.reward and (t.reward.value, t.reward.valid),
                t.weight,
                t.versions,
                *([t.turns, t.segments, t.fault] if t.turns else []),
                *t.publish_logprobs,
                *([t.ref_logprobs] if t.ref_logprobs else []),  # last, with a reference
            )
            for t in group.trajectories
        ),
    )


class FakeTrainer:
    def __init__(self, compute: FakeCompute, engine: Callable[[], FakeEngine] | None = None) -> None:
        self.state = TrainerState()
        self.open: list[tuple[object, ...]] = []
        self.positions: list[list[int]] = []  # by batch, in training order
        self.salt = ""  # simulates other rounding
        self.learns = True  # False: the weights never change, only their version
        self._compute, self._engine = compute, engine

    @property
    def version(self) -> PolicyVersion:
        return self.state.version

    async def accumulate(self, group: Group) -> None:
        await self._compute.run(lambda: self.open.append(seen(group)))

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return await self._compute.run(lambda: [logprobs_of(completion, self.version) for completion in completions])

    async def commit(self, step: int) -> StepMetrics:
        return await self._compute.run(lambda: self._commit(step))

    def _commit(self, step: int) -> StepMetrics:
        assert self._engine is None or self._engine().keeps_jobs or not self._engine().jobs, (
            "the weights changed while samples were in flight"
        )
        assert step == self.state.version.number + 1
        batch, self.open = tuple(self.open), []
        self.positions.append([group[0] for group in batch])  # type: ignore[misc]
        known = self.state.version.digest
        digest = digest_of(known, batch, self.salt) if self.learns else known
        self.state = TrainerState(PolicyVersion(number=step, digest=digest), (*self.state.history, batch))
        return StepMetrics(step=step, version=self.version, optimizer_steps=1, values={"loss": 1.0})

    async def save(self, directory: Path) -> None:
        raise NotImplementedError

    async def restore(self, directory: Path) -> None:
        raise NotImplementedError


class FakeCheckpoints:
    """Calls `power` before and after every write, which may raise PowerCut."""

    def __init__(self, disk: Disk, trainer: FakeTrainer, power: Callable[[], None] = lambda: None) -> None:
        self.disk, self.trainer, self.power = disk, trainer, power
        self.saved: list[tuple[int, float | None]] = []

    async def save(self, step: int, *, score: float | None, pinned: int | None = None) -> None:
        self.power()
        await asyncio.sleep(0.5)
        assert self.trainer.version.number == step
        self.disk.checkpoints[step] = self.trainer.state
        self.saved.append((step, score))
        self.power()

    async def steps(self) -> list[int]:
        return sorted(self.disk.checkpoints)

    async def restore_latest(self) -> int:
        step = max(self.disk.checkpoints, default=0)
        self.trainer.state = self.disk.checkpoints.get(step, TrainerState())
        return step


class FakeScorer:
    """Takes a short time; the reward depends on the tokens; every 17th is invalid."""

    def __init__(self) -> None:
        self.scored: list[SampleId] = []

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        key = number("score", trajectory.sample_id.key)
        await asyncio.sleep(key % 7 / 100)
        self.scored.append(trajectory.sample_id)
        if key % 17 == 0:
            return Reward(value=0.0, valid=False, reason="unlucky")
        odd = sum(unpack_tokens(trajectory.completion_ids)) % 2 == 1
        return Reward(value=float(odd), components={"odd": 1.0}, correct=odd)

    async def close(self) -> None:
        pass


class FakeTelemetry:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[StepMetrics] = []
        self.sample_files: dict[tuple[int, str], list[SampleId]] = {}
        self.progressed: list[tuple[str, int, int]] = []
        self.fleet_rows: tuple[FleetRow, ...] = ()

    def resume(self, step: int) -> None:
        self.event("resume", step=step)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        by_purpose: dict[str, list[SampleId]] = {}
        for trajectory, prompt in zip(trajectories, prompts, strict=True):
            assert trajectory.sample_id.prompt_id == prompt.prompt_id
            by_purpose.setdefault(trajectory.sample_id.purpose, []).append(trajectory.sample_id)
        self.sample_files |= {(step, purpose): ids for purpose, ids in by_purpose.items()}

    def progress(self, phase: str, done: int, total: int) -> None:
        self.progressed.append((phase, done, total))

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        self.fleet_rows = tuple(rows)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.events if found == name]


def small_spec(**sections: Any) -> RunSpec:
    defaults: dict[str, Any] = {
        "batch": {"prompts": 3, "group_size": 2},
        "sampling": {"max_new_tokens": MAX_NEW},
        "trainer": {"steps": 4},
        "eval": {"every_steps": 2, "prompts": 4},
        "checkpoint": {"every_steps": 2},
    }
    return RunSpec.model_validate(
        {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in defaults}
        | {name: value for name, value in sections.items() if name not in defaults}
    )


@dataclass
class Session:
    """One process; everything except the disk is new."""

    disk: Disk = field(default_factory=Disk)
    spec: RunSpec = field(default_factory=small_spec)
    power_cut_after: int | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    slots: int = 3
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    frozen_scorer: FakeFrozenScorer | None = None  # the reference
    eval_sets: dict[str, list[Prompt]] = field(default_factory=dict)
    environments: FakeEnvironments | None = None
    guard: FakeGuard | None = None
    control: RunControl | None = None
    result: LoopResult | None = None

    def __post_init__(self) -> None:
        self.journal = MemoryJournal(self.disk.journal, power_cut_after=self.power_cut_after)
        self.compute = FakeCompute(0.1)
        self.trainer = FakeTrainer(self.compute, lambda: self.engine)
        self.training: TrainingRun | None = None
        ahead = self.spec.schedule.max_policy_lag > 0
        self.engine = FakeEngine(self.trainer.version, slots=self.slots, keeps_jobs=ahead)
        self.worker = EngineWorker(self.engine, self.compute, clock=LoopClock(), tick_s=0.1)
        self.scorer, self.eval_scorer = FakeScorer(), FakeScorer()
        self.telemetry = FakeTelemetry()
        self.checkpoints = FakeCheckpoints(self.disk, self.trainer)
        self.source = FakePrompts(self.spec.batch.prompts)
        self.ledger = Ledger(self.journal, round_size=self.spec.round_groups)
        self.fleet = Fleet(
            self.worker,
            slots=self.slots,
            clock=LoopClock(),
            telemetry=self.telemetry,
            timeouts=self.timeouts,
            needs_logprobs=self.spec.algorithm.needs_rollout_logprobs,
        )

    async def run(self) -> LoopResult:
        """Train; the disk keeps the journal also on failure."""
        try:
            async with self.fleet:
                rollout = RolloutContext(
                    fleet=self.fleet,
                    ledger=self.ledger,
                    scorer=self.scorer,
                    codec=FakeCodec(),
                    telemetry=self.telemetry,
                    clock=LoopClock(),
                    stop=self.stop,
                    timeouts=self.timeouts,
                    truncated=self.spec.scoring.truncated,
                    frozen_scoring=self.frozen_scorer.scoring() if self.frozen_scorer else None,
                    environments=self.environments,
                    agent=LIMITS if self.environments else None,
                )
                run = TrainingRun(
                    spec=self.spec,
                    rollout=rollout,
                    source=self.source,
                    trainer=self.trainer,
                    eval_scorer=self.eval_scorer,
                    checkpoints=self.checkpoints,
                    eval_sets=self.eval_sets,
                    guard=self.guard,
                    rollbacks=self.disk.rollbacks,
                    control=self.control,
                )
                self.training = run
                return await train_loop(run)
        finally:
            self.disk.journal = self.journal.disk
            await self.worker.close()

    async def run_until_power_cut(self) -> LoopResult | None:
        """Train; None after a power cut."""
        try:
            return await self.run()
        except PowerCut:
            return None


PROBE = pack_tokens([1, 2, 3])
PROBE_LOGPROBS = pack_logprobs([-0.5, -1.0])
NOWHERE = PolicyVersion(number=-1, digest="none")


def granted(name: str, at_s: float = 0.0, *, ends_s: float | None = None) -> tuple[float, LeaseEvent]:
    lease = Lease(
        lease_id=f"lease-{name}",
        worker_id=f"spot-{name}",
        kind="preemptible",
        price_usd_per_hour=3.6,
        start_s=at_s,
        ends_s=ends_s,
    )
    return at_s, LeaseGranted(lease=lease)


def noticed(name: str, at_s: float, deadline_s: float) -> tuple[float, LeaseEvent]:
    return at_s, LeaseNoticed(lease_id=f"lease-{name}", deadline_s=deadline_s)


def ended(name: str, at_s: float) -> tuple[float, LeaseEvent]:
    return at_s, LeaseEnded(lease_id=f"lease-{name}", cause="evicted")


class FakeWeightSource:
    """A weight source that takes `pull_s` per version."""

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
    """An engine of a pool worker; probed after every swap."""

    probe_logprobs = PROBE_LOGPROBS

    def probe(self, token_ids: bytes) -> bytes:
        assert token_ids == PROBE
        return self.probe_logprobs


@dataclass
class FakeHost:
    """Starts workers with fake engines; `prepare` may make one faulty."""

    publisher: FakePublisher
    boot_s: float = 0.2
    pull_s: float = 0.3
    slots: int = 3
    tick_s: float = 0.1
    per_poll: int = 2
    source_type: type[FakeWeightSource] = FakeWeightSource
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
    """A host whose workers never start: they raise, or hang if `silent`."""

    silent = False

    async def start(self, lease: Lease) -> Worker:
        if self.silent:
            await asyncio.sleep(10**9)
        raise WorkerLost("no such machine", hint="try another zone")


@dataclass
class PoolSession(Session):
    """A session with a scripted pool."""

    script: Sequence[tuple[float, LeaseEvent]] = ()
    config: FleetConfig = field(default_factory=FleetConfig)
    seeding_worker: bool = True  # whether the reserved side has an engine
    host_type: type[FakeHost] = FakeHost
    watch: MachineGuard | None = None

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
            machines=self.watch,
        )


def trained(session: Session) -> object:
    """The trainer's state: all training inputs and the weights."""
    trainer, telemetry = session.trainer, session.telemetry
    assert isinstance(trainer, FakeTrainer)
    assert isinstance(telemetry, FakeTelemetry)
    return trainer.state
