"""One life of a training process among small deterministic stand-ins, and a disk that outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fake_engine import FakeCompute, FakeEngine, FakeReader
from tests.fake_samples import MAX_NEW, FakeCodec, FakeSource, digest_of, number, said_of
from tests.memory_journal import MemoryJournal, PowerCut
from tidemill.config.schema import RunSpec
from tidemill.controller.fleet import Fleet
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.waiting import Timeouts
from tidemill.core.protocols import LoopClock
from tidemill.core.records import (
    Completion,
    FleetRow,
    Group,
    LogprobBuffer,
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    StepMetrics,
    Trajectory,
    unpack_tokens,
)
from tidemill.rollout.worker import EngineWorker


@dataclass
class Disk:
    """What survives a kill."""

    journal: bytes = b""
    checkpoints: dict[int, TrainerState] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerState:
    """Its history is its weights: every batch learned from, group by group."""

    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(number=0, digest="init"))
    history: tuple[tuple[object, ...], ...] = ()


def seen(group: Group) -> tuple[object, ...]:
    """All of a group that a trainer learns from."""
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
                *t.publish_logprobs,
                *([t.ref_logprobs] if t.ref_logprobs else []),  # last, where a reference reads
            )
            for t in group.trajectories
        ),
    )


class FakeTrainer:
    def __init__(self, compute: FakeCompute, engine: Callable[[], FakeEngine] | None = None) -> None:
        self.state = TrainerState()
        self.open: list[tuple[object, ...]] = []
        self.positions: list[list[int]] = []  # in the order learned from, batch by batch
        self.salt = ""  # as if another machine rounded differently
        self._compute, self._engine = compute, engine

    @property
    def version(self) -> PolicyVersion:
        return self.state.version

    async def accumulate(self, group: Group) -> None:
        await self._compute.run(lambda: self.open.append(seen(group)))

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return await self._compute.run(lambda: [said_of(completion, self.version) for completion in completions])

    async def commit(self, step: int) -> StepMetrics:
        return await self._compute.run(lambda: self._commit(step))

    def _commit(self, step: int) -> StepMetrics:
        assert self._engine is None or self._engine().keeps_jobs or not self._engine().jobs, (
            "the weights moved while samples were in flight"
        )
        assert step == self.state.version.number + 1
        batch, self.open = tuple(self.open), []
        self.positions.append([group[0] for group in batch])  # type: ignore[misc]
        digest = digest_of(self.state.version.digest, batch, self.salt)
        self.state = TrainerState(PolicyVersion(number=step, digest=digest), (*self.state.history, batch))
        return StepMetrics(step=step, version=self.version, optimizer_steps=1, values={"loss": 1.0})

    async def save(self, directory: Path) -> None:
        raise NotImplementedError

    async def restore(self, directory: Path) -> None:
        raise NotImplementedError


class FakeCheckpoints:
    """`power` is asked before and after every write; it may cut."""

    def __init__(self, disk: Disk, trainer: FakeTrainer, power: Callable[[], None] = lambda: None) -> None:
        self.disk, self.trainer, self.power = disk, trainer, power
        self.saved: list[tuple[int, float | None]] = []

    async def save(self, step: int, *, score: float | None) -> None:
        self.power()
        await asyncio.sleep(0.5)
        assert self.trainer.version.number == step
        self.disk.checkpoints[step] = self.trainer.state
        self.saved.append((step, score))
        self.power()

    async def restore_latest(self) -> int:
        step = max(self.disk.checkpoints, default=0)
        self.trainer.state = self.disk.checkpoints.get(step, TrainerState())
        return step


class FakeScorer:
    """Takes a moment; the reward depends on the tokens, and every 17th sample's is invalid."""

    def __init__(self) -> None:
        self.scored: list[SampleId] = []

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        key = number("score", trajectory.sample_id.key)
        await asyncio.sleep(key % 7 / 100)
        self.scored.append(trajectory.sample_id)
        if key % 17 == 0:
            return Reward(value=0.0, valid=False, reason="unlucky")
        return Reward(value=float(sum(unpack_tokens(trajectory.completion_ids)) % 2), components={"odd": 1.0})

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
        for trajectory, prompt in zip(trajectories, prompts, strict=True):
            assert trajectory.sample_id.prompt_id == prompt.prompt_id
        self.sample_files[step, trajectories[0].sample_id.purpose] = [t.sample_id for t in trajectories]

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
    """One process's life: everything but the disk is new."""

    disk: Disk = field(default_factory=Disk)
    spec: RunSpec = field(default_factory=small_spec)
    power_cut_after: int | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    slots: int = 3
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    reader: FakeReader | None = None  # of the reference
    result: LoopResult | None = None

    def __post_init__(self) -> None:
        self.journal = MemoryJournal(self.disk.journal, power_cut_after=self.power_cut_after)
        self.compute = FakeCompute(0.1)
        self.trainer = FakeTrainer(self.compute, lambda: self.engine)
        ahead = self.spec.schedule.max_policy_lag > 0
        self.engine = FakeEngine(self.trainer.version, slots=self.slots, keeps_jobs=ahead)
        self.worker = EngineWorker(self.engine, self.compute, clock=LoopClock(), tick_s=0.1)
        self.scorer, self.eval_scorer = FakeScorer(), FakeScorer()
        self.telemetry = FakeTelemetry()
        self.checkpoints = FakeCheckpoints(self.disk, self.trainer)
        self.source = FakeSource(self.spec.batch.prompts)
        self.ledger = Ledger(self.journal, round_size=self.spec.batch.prompts)
        self.fleet = Fleet(
            self.worker,
            slots=self.slots,
            clock=LoopClock(),
            telemetry=self.telemetry,
            timeouts=self.timeouts,
            needs_logprobs=self.spec.algorithm.needs_rollout_logprobs,
        )

    async def run(self) -> LoopResult:
        """Train; whatever happens, the disk has what it had at the end."""
        try:
            async with self.fleet:
                return await train_loop(
                    spec=self.spec,
                    source=self.source,
                    fleet=self.fleet,
                    trainer=self.trainer,
                    scorer=self.scorer,
                    eval_scorer=self.eval_scorer,
                    ledger=self.ledger,
                    checkpoints=self.checkpoints,
                    telemetry=self.telemetry,
                    codec=FakeCodec(),
                    clock=LoopClock(),
                    stop=self.stop,
                    reading=self.reader.reading() if self.reader else None,
                    timeouts=self.timeouts,
                )
        finally:
            self.disk.journal = self.journal.disk
            await self.worker.close()

    async def run_until_power_cut(self) -> LoopResult | None:
        """None when the power went."""
        try:
            return await self.run()
        except PowerCut:
            return None
