"""The simulated twins, each with a witness beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tests.fault_simulation.invariants import Violation, Witness
from tests.fault_simulation.journal_reading import Durable
from tests.fault_simulation.training_invariants import Lessons
from tests.memory_journal import MemoryJournal
from tidemill.controller.in_flight import InFlight
from tidemill.controller.ledger import Ledger, decode
from tidemill.core.protocols import Clock, Journal
from tidemill.core.records import FleetRow, Group, Prompt, Reward, StepMetrics, Trajectory
from tidemill.sim.costs import TrainerCosts
from tidemill.sim.simulated_trainer import SimulatedTrainer


class WatchedJournal(MemoryJournal):
    """The witness reads what was written; a write takes `seconds`."""

    def __init__(self, disk: bytes, witness: Witness, *, power_cut_after: int | None, seconds: float) -> None:
        super().__init__(disk, power_cut_after=power_cut_after)
        self.accepted = 0  # tokens
        self._witness, self._seconds = witness, seconds
        self._turn = asyncio.Lock()

    async def append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        async with self._turn:
            if self._seconds:
                await asyncio.sleep(self._seconds)
            await super().append(blobs)
            before = self._witness.durable.tokens
            for _, blob in blobs:
                self._take(self._witness.durable, blob)
            self.accepted += self._witness.durable.tokens - before

    async def load(self) -> list[tuple[int, bytes]]:
        stored = await super().load()
        self._read(stored)
        return stored

    async def prune(self, through_step: int) -> None:
        async with self._turn:
            await super().prune(through_step)
            self._read(await super().load())

    def _read(self, stored: Sequence[tuple[int, bytes]]) -> None:
        durable = Durable(self._witness.spec.batch.group_size)
        for _, blob in stored:
            self._take(durable, blob)
        self._witness.durable = durable

    @staticmethod
    def _take(durable: Durable, blob: bytes) -> None:
        try:
            durable.take(decode(blob))
        except (LookupError, ValueError) as error:
            raise Violation(f"the journal makes no sense: {error!r}") from error


class WatchedLedger(Ledger):
    """Shows the witness what it made of the journal."""

    def __init__(self, journal: Journal, witness: Witness, lessons: Lessons, *, round_size: int) -> None:
        super().__init__(journal, round_size=round_size)
        self._witness, self._lessons = witness, lessons

    async def load(
        self, in_flight: InFlight, prompt_of: Callable[[int], tuple[int, Prompt]], *, after_step: int
    ) -> int:
        self._lessons.restored(after_step)
        replayed = await super().load(in_flight, prompt_of, after_step=after_step)
        self._witness.resumed(in_flight, self._lessons.learned)
        return replayed

    async def drop(self, in_flight: InFlight, position: int) -> None:
        await super().drop(in_flight, position)
        self._lessons.dropped.add(position)


class WatchedTrainer(SimulatedTrainer):
    def __init__(self, costs: TrainerCosts, lessons: Lessons, *, salt: str) -> None:
        super().__init__(costs, salt=salt)
        self._lessons = lessons

    async def accumulate(self, group: Group) -> None:
        self._lessons.learns(group, self.version)
        await super().accumulate(group)

    async def commit(self, step: int) -> StepMetrics:
        self._lessons.committed(step)
        return await super().commit(step)


class WatchedScorer:
    """Judges by `reward`; raises, or never comes back, when it is told to."""

    def __init__(self, lessons: Lessons, *, seconds: float, reward: Callable[[Trajectory], Reward]) -> None:
        self.broken: Exception | None = None
        self.hangs = False
        self._lessons, self._seconds, self._reward = lessons, seconds, reward

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        self._lessons.judged(prompt, trajectory)
        await asyncio.sleep(self._seconds * (trajectory.completion_length % 4) / 3)
        if self.broken is not None:
            raise self.broken
        if self.hangs:
            await asyncio.sleep(1e9)
        return self._reward(trajectory)

    async def close(self) -> None:
        pass


class EventLog:
    """Implements `core.protocols.Telemetry`: keeps every event with its time."""

    def __init__(self, clock: Clock, lessons: Lessons) -> None:
        self.lines: list[tuple[float, str, dict[str, Any]]] = []
        self.steps: list[StepMetrics] = []
        self._clock, self._lessons = clock, lessons

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for _, found, fields in self.lines if found == name]

    def resume(self, step: int) -> None:
        self.event("resume", step=step)

    def event(self, name: str, **fields: Any) -> None:
        self.lines.append((self._clock.now(), name, fields))

    def step(self, metrics: StepMetrics) -> None:
        self.event("step", step=metrics.step, version=metrics.version.digest, **metrics.values)
        self._lessons.told(metrics)
        self.steps.append(metrics)

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        self._lessons.told_samples(step, trajectories)

    def progress(self, phase: str, done: int, total: int) -> None:
        pass

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        pass


def reward_of(trajectory: Trajectory) -> Reward:
    """A function of the tokens; every ninth is invalid, and there are groups without signal."""
    number = sum(trajectory.completion_ids) + trajectory.completion_length
    if number % 9 == 0:
        return Reward(value=0.0, valid=False, reason="unlucky")
    return Reward(value=float(number % 2))
