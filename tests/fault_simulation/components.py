"""Simulated components that report to the invariants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.doubles.journal import MemoryJournal
from tests.fault_simulation.guarding import Disk
from tests.fault_simulation.invariants import Invariants, Violation, require
from tests.fault_simulation.journal_reading import DurableState
from tests.fault_simulation.training_invariants import TrainingInvariants
from tidemill.controller.entries import decode
from tidemill.controller.in_flight import InFlight
from tidemill.controller.ledger import Ledger
from tidemill.controller.samples import Sample
from tidemill.core.protocols import Clock, Journal
from tidemill.core.records import FleetRow, Group, Prompt, Reward, StepMetrics, Trajectory
from tidemill.sim.costs import TrainerCosts
from tidemill.sim.simulated_trainer import SimulatedCheckpoints, SimulatedTrainer


class WatchedJournal(MemoryJournal):
    """A journal whose writes are checked. A write takes `seconds`; those that wait are written together, in order."""

    def __init__(self, disk: bytes, invariants: Invariants, *, power_cut_after: int | None, seconds: float) -> None:
        super().__init__(disk, power_cut_after=power_cut_after)
        self.accepted = 0  # tokens
        self._invariants, self._seconds = invariants, seconds
        self._last = asyncio.Event()  # set once the last write has ended
        self._last.set()

    @asynccontextmanager
    async def _in_order(self) -> AsyncIterator[None]:
        earlier, own = self._last, asyncio.Event()
        self._last = own
        try:
            if self._seconds:
                await asyncio.sleep(self._seconds)
            await earlier.wait()
            yield
        finally:
            own.set()

    async def append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        async with self._in_order():
            await super().append(blobs)
            self._invariants.durable.live = True
            before = self._invariants.durable.tokens
            for _, blob in blobs:
                self._take(self._invariants.durable, blob, live=True)
            self._invariants.note_renewed()
            self.accepted += self._invariants.durable.tokens - before

    async def load(self) -> list[tuple[int, bytes]]:
        stored = await super().load()
        self._read(stored)
        return stored

    async def prune(self, through_step: int) -> None:
        async with self._in_order():
            await super().prune(through_step)
            self._read(await super().load())

    def _read(self, stored: Sequence[tuple[int, bytes]]) -> None:
        durable = self._invariants.nothing_durable()
        for _, blob in stored:
            self._take(durable, blob, live=False)
        self._invariants.durable = durable
        self._invariants.note_renewed()

    def _take(self, durable: DurableState, blob: bytes, *, live: bool) -> None:
        try:
            entry = decode(blob)
            if self._invariants.guarding is not None:
                self._invariants.guarding.take(entry, durable)
            if self._invariants.tail is not None:
                self._invariants.tail.take(entry, durable, live=live)
            durable.take(entry)
        except (LookupError, ValueError) as error:
            raise Violation(f"the journal is inconsistent: {error!r}") from error


class WatchedLedger(Ledger):
    """A ledger whose replay is checked."""

    def __init__(
        self, journal: Journal, invariants: Invariants, training: TrainingInvariants, *, round_size: int
    ) -> None:
        super().__init__(journal, round_size=round_size)
        self._invariants, self._training = invariants, training

    async def load(
        self,
        in_flight: InFlight,
        prompt_of: Callable[[int], tuple[int, Prompt]],
        *,
        after_step: int,
        restart_open: bool = True,
    ) -> int:
        self._training.restored(after_step)
        replayed = await super().load(in_flight, prompt_of, after_step=after_step, restart_open=restart_open)
        self._training.dropped |= self._invariants.durable.dropped  # a power cut may strike before `drop` returns
        self._invariants.resumed(in_flight, self._training.learned)
        self._training.dropped_at.setdefault(after_step, set(self._training.dropped))
        self._check_guard(after_step)
        return replayed

    def _check_guard(self, step: int) -> None:
        durable, guarding = self._invariants.durable, self._invariants.guarding
        said, right = [*self.evidence], [*durable.evidence]
        left = [each for each in said if each > step and each not in self.batches]
        require(not left, f"evidence of steps {left} was resumed without their batches")
        require(self.evidence == durable.evidence, f"evidence of steps {said} was resumed, not {right}")
        require(self.decisions == durable.decisions, f"{self.decisions} were resumed, not {durable.decisions}")
        if guarding is not None:
            guarding.restored(step)

    async def prune(self, in_flight: InFlight, through_step: int) -> None:
        self._training.dropped_at[through_step] = set(self._training.dropped)
        await super().prune(in_flight, through_step)

    async def record_batch(
        self, in_flight: InFlight, step: int, positions: Sequence[int], *, reward_mean: float | None
    ) -> list[Sample]:
        samples = await super().record_batch(in_flight, step, positions, reward_mean=reward_mean)
        self._training.recorded(in_flight)
        return samples

    async def drop(self, in_flight: InFlight, position: int) -> None:
        await super().drop(in_flight, position)
        self._training.dropped.add(position)


class WatchedTrainer(SimulatedTrainer):
    def __init__(self, costs: TrainerCosts, training: TrainingInvariants, *, salt: str) -> None:
        super().__init__(costs, salt=salt)
        self._training = training

    async def accumulate(self, group: Group) -> None:
        self._training.learns(group, self.version)
        await super().accumulate(group)

    async def commit(self, step: int) -> StepMetrics:
        self._training.committed(step)
        return await super().commit(step)


class WatchedCheckpoints(SimulatedCheckpoints):
    def __init__(self, disk: Disk, trainer: SimulatedTrainer, costs: TrainerCosts, invariants: Invariants) -> None:
        super().__init__(disk, trainer, costs)
        self._kept, self._invariants = disk, invariants

    async def save(self, step: int, *, score: float | None, pinned: int | None = None) -> None:
        await super().save(step, score=score)
        self._kept.keep(step, self._trainer.version, pinned)
        self._invariants.saved(step)


class WatchedScorer:
    """Scores with `reward`; raises or hangs on request."""

    def __init__(self, training: TrainingInvariants, *, seconds: float, reward: Callable[[Trajectory], Reward]) -> None:
        self.broken: Exception | None = None
        self.hangs = False
        self._training, self._seconds, self._reward = training, seconds, reward

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        self._training.judged(prompt, trajectory)
        await asyncio.sleep(self._seconds * (trajectory.completion_length % 4) / 3)
        if self.broken is not None:
            raise self.broken
        if self.hangs:
            await asyncio.sleep(1e9)
        return self._reward(trajectory)

    async def close(self) -> None:
        pass


class EventLog:
    """Implements `core.protocols.Telemetry`: records every event with its time."""

    def __init__(self, clock: Clock, training: TrainingInvariants) -> None:
        self.lines: list[tuple[float, str, dict[str, Any]]] = []
        self.steps: list[StepMetrics] = []
        self._clock, self._training = clock, training

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for _, found, fields in self.lines if found == name]

    def resume(self, step: int) -> None:
        self.event("resume", step=step)

    def event(self, name: str, **fields: Any) -> None:
        self.lines.append((self._clock.now(), name, fields))

    def step(self, metrics: StepMetrics) -> None:
        self.event("step", step=metrics.step, version=metrics.version.digest, **metrics.values)
        self._training.told(metrics)
        self.steps.append(metrics)

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        self._training.told_samples(step, trajectories)

    def progress(self, phase: str, done: int, total: int) -> None:
        pass

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        pass


def reward_of(trajectory: Trajectory) -> Reward:
    """A reward as a function of the tokens; every ninth is invalid, and some groups have no signal. That of an episode
    is its environment's."""
    if trajectory.fault:
        return Reward(value=0.0, valid=False, reason=trajectory.fault)
    if trajectory.turns:
        total = sum(turn.reward for turn in trajectory.turns)
        return Reward(value=total if trajectory.outcome is None else trajectory.outcome)
    number = sum(trajectory.completion_ids) + trajectory.completion_length
    if number % 9 == 0:
        return Reward(value=0.0, valid=False, reason="unlucky")
    return Reward(value=float(number % 2))
