"""A trainer that learns nothing, and its checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from tidemill.core.buffers import LogprobBuffer, TokenBuffer
from tidemill.core.clock import Clock
from tidemill.core.records import Completion, Group, PolicyVersion, StepMetrics
from tidemill.sim.costs import TrainerCosts

Spend: TypeAlias = Callable[[float], Awaitable[None]]

START = PolicyVersion(number=0, digest="start")


def publish_logprobs(version: int, token_ids: TokenBuffer) -> LogprobBuffer:
    """What a version says of tokens (int32 [N]): bytes that tell of both, no numbers that mean anything."""
    return bytes((byte + version) % 256 for byte in token_ids)


class SimulatedTrainer:
    """Implements `core.protocols.Trainer`. A version's digest tells of the one before and of `salt`, no more.

    Args:
        spend: takes the seconds that it computes.
        salt: as if another machine rounded differently: versions made again after a restart differ.
    """

    def __init__(self, costs: TrainerCosts, *, salt: str = "", spend: Spend = asyncio.sleep) -> None:
        self.version = START
        self.salt = salt
        self._costs, self._spend = costs, spend

    async def accumulate(self, group: Group) -> None:
        await self._spend(self._costs.accumulate_s(group))

    async def logprobs(self, completions: Sequence[Completion]) -> Sequence[LogprobBuffer]:
        """In no time."""
        return [publish_logprobs(self.version.number, completion.token_ids) for completion in completions]

    async def commit(self, step: int) -> StepMetrics:
        await self._spend(self._costs.commit_s())
        made_of = f"{self.version.digest} {step} {self.salt}"
        digest = hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest()
        self.version = PolicyVersion(number=step, digest=digest)
        return StepMetrics(step=step, version=self.version, optimizer_steps=1, values={})


class LearningTrainer(SimulatedTrainer):
    """Tells of a batch what a trainer would, and when it was learning.

    Args:
        gpus: entered for as long as it computes; waiting for them is no learning.
        streams: it learns from groups as they come; else from all of a batch when it commits.
    """

    def __init__(
        self,
        costs: TrainerCosts,
        *,
        clock: Clock,
        gpus: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        streams: bool = True,
        spend: Spend = asyncio.sleep,
    ) -> None:
        super().__init__(costs, spend=spend)
        self.learned: list[tuple[float, float]] = []  # (begin, end) of each stretch, in seconds
        self._streams, self._groups = streams, list[Group]()
        self._clock, self._gpus = clock, gpus
        self._seconds, self._tokens_by_lag = 0.0, Counter[int]()

    async def accumulate(self, group: Group) -> None:
        self._groups.append(group)
        if self._streams:
            async with self._learning():
                await self._learn()
        for trajectory in group.trajectories:
            for run in trajectory.versions:
                self._tokens_by_lag[self.version.number - run.version.number] += run.end - run.start

    async def commit(self, step: int) -> StepMetrics:
        async with self._learning():
            await self._learn()
            metrics = await super().commit(step)
        tokens = self._tokens_by_lag.total()
        values = {"tokens_trained": float(tokens), "time_train_s": self._seconds}
        values |= {f"lag/{lag}": count / tokens for lag, count in sorted(self._tokens_by_lag.items())}
        self._seconds, self._tokens_by_lag = 0.0, Counter()
        return msgspec.structs.replace(metrics, values=values)

    async def _learn(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            await super().accumulate(group)

    @asynccontextmanager
    async def _learning(self) -> AsyncIterator[None]:
        async with self._gpus():
            began_s = self._clock.now()
            yield
            now_s = self._clock.now()
        self._seconds += now_s - began_s
        if self.learned and self.learned[-1][1] == began_s:
            began_s = self.learned.pop()[0]
        self.learned.append((began_s, now_s))


@dataclass
class SimulatedDisk:
    """What survives the process: the journal's bytes, and the trainer's versions by step."""

    journal: bytes = b""
    checkpoints: dict[int, PolicyVersion] = field(default_factory=dict)


class SimulatedCheckpoints:
    """Implements `core.protocols.Checkpoints`."""

    def __init__(self, disk: SimulatedDisk, trainer: SimulatedTrainer, costs: TrainerCosts) -> None:
        self._disk, self._trainer, self._costs = disk, trainer, costs

    async def save(self, step: int, *, score: float | None) -> None:
        await asyncio.sleep(self._costs.checkpoint_s())
        self._disk.checkpoints[step] = self._trainer.version

    async def restore_latest(self) -> int:
        await asyncio.sleep(self._costs.checkpoint_s())
        step = max(self._disk.checkpoints, default=0)
        self._trainer.version = self._disk.checkpoints.get(step, START)
        return step
