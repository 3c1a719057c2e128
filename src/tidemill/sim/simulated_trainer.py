"""A simulated trainer, its checkpoints, and weights as sizes without contents."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from tidemill.core.protocols import Clock
from tidemill.core.records import (
    Completion,
    Group,
    LogprobBuffer,
    PolicyVersion,
    Pulled,
    StepMetrics,
    TokenBuffer,
    WeightManifest,
)
from tidemill.sim.costs import TrainerCosts, WeightCosts

Spend: TypeAlias = Callable[[float], Awaitable[None]]

START = PolicyVersion(number=0, digest="start")


def publish_logprobs(version: int, token_ids: TokenBuffer) -> LogprobBuffer:
    """Logprobs of tokens (int32 [N]) under a version: bytes that encode both, without meaning."""
    return bytes((byte + version) % 256 for byte in token_ids)


class SimulatedTrainer:
    """Implements `core.protocols.Trainer`. A version's digest depends on the previous one and on `salt`.

    Args:
        spend: waits for the given seconds.
        salt: simulates another machine with other rounding: versions recomputed after a restart differ.
    """

    def __init__(self, costs: TrainerCosts, *, salt: str = "", spend: Spend = asyncio.sleep) -> None:
        self.version = START
        self.salt = salt
        self._costs, self._spend = costs, spend

    async def accumulate(self, group: Group) -> None:
        await self._spend(self._costs.accumulate_s(group))

    async def logprobs(self, completions: Sequence[Completion]) -> Sequence[LogprobBuffer]:
        """Takes no time."""
        return [publish_logprobs(self.version.number, completion.token_ids) for completion in completions]

    async def commit(self, step: int) -> StepMetrics:
        await self._spend(self._costs.commit_s())
        made_of = f"{self.version.digest} {step} {self.salt}"
        digest = hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest()
        self.version = PolicyVersion(number=step, digest=digest)
        return StepMetrics(step=step, version=self.version, optimizer_steps=1, values={})


class LearningTrainer(SimulatedTrainer):
    """A trainer that also reports metrics and when it was training.

    Args:
        gpus: context entered while it computes; waiting for it does not count as training.
        streams: train on each group as it arrives; else on the whole batch at commit.
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
        self.learned: list[tuple[float, float]] = []  # (start, end) of each interval, in seconds
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
    """Durable state: the journal's bytes and checkpoints by step."""

    journal: bytes = b""
    checkpoints: dict[int, PolicyVersion] = field(default_factory=dict)


class SimulatedCheckpoints:
    """Implements `core.protocols.Checkpoints`."""

    def __init__(self, disk: SimulatedDisk, trainer: SimulatedTrainer, costs: TrainerCosts) -> None:
        self._disk, self._trainer, self._costs = disk, trainer, costs

    async def save(self, step: int, *, score: float | None, pinned: int | None = None) -> None:
        await asyncio.sleep(self._costs.checkpoint_s())
        self._disk.checkpoints[step] = self._trainer.version

    async def steps(self) -> list[int]:
        return sorted(self._disk.checkpoints)

    async def restore_latest(self) -> int:
        await asyncio.sleep(self._costs.checkpoint_s())
        step = max(self._disk.checkpoints, default=0)
        self._trainer.version = self._disk.checkpoints.get(step, START)
        return step


class Uplink:
    """Concurrent transfers at equal rates: the smaller of the downlink and an equal share of the uplink.

    Rates in bytes per second; an infinite rate takes no time.
    """

    def __init__(self, bytes_per_s: float, downlink_bytes_per_s: float, clock: Clock) -> None:
        self._rate, self._most, self._clock = bytes_per_s, downlink_bytes_per_s, clock
        self._moved = 0.0  # bytes moved by a transfer active since the start
        self._at_s = 0.0  # time of `_moved`
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []  # heap by the `_moved` at which each finishes
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None

    async def carry(self, nbytes: float) -> None:
        """Return when `nbytes` have arrived."""
        if min(self._rate, self._most) == math.inf:
            return
        self._advance()
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._ends, (self._moved + nbytes, self._serial, done))
        self._serial += 1
        self._await_next()
        try:
            await done
        finally:
            if not done.done() or done.cancelled():  # cancelled: the others get its share
                self._advance()
                self._ends = [entry for entry in self._ends if entry[2] is not done]
                heapq.heapify(self._ends)
                self._await_next()

    @property
    def _each(self) -> float:
        """Rate of one transfer."""
        return min(self._most, self._rate / max(len(self._ends), 1))

    def _advance(self) -> None:
        now_s = self._clock.now()
        self._moved += self._each * (now_s - self._at_s)
        self._at_s = now_s

    def _await_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            seconds = max(0.0, (self._ends[0][0] - self._moved) / self._each)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._finish)

    def _finish(self) -> None:
        """Complete the first transfer exactly, without a rounding remainder."""
        self._advance()
        self._moved = max(self._moved, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._moved:
            _, _, done = heapq.heappop(self._ends)
            if not done.done():
                done.set_result(None)
        self._await_next()


def _manifest(version: PolicyVersion, costs: WeightCosts) -> WeightManifest:
    return WeightManifest(version=version, digest=version.digest, nbytes=costs.nbytes, tensors=())


class SimulatedPublisher:
    """Implements `core.protocols.Publisher`."""

    def __init__(self, costs: WeightCosts) -> None:
        self._costs = costs

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        await asyncio.sleep(self._costs.publish_s)
        return _manifest(version, self._costs)

    async def close(self) -> None:
        pass


class CountedWeights:
    """Implements `core.protocols.WeightSource` without data: pulls a delta from the previous version, else a snapshot.

    Args:
        uplink: shared by all workers.
    """

    def __init__(self, costs: WeightCosts, clock: Clock, uplink: Uplink) -> None:
        self._costs, self._clock, self._uplink = costs, clock, uplink
        self._number: int | None = None  # of the held version

    async def prepare(self, version: PolicyVersion) -> Pulled:
        began_s, costs = self._clock.now(), self._costs
        full = not costs.delta_nbytes or self._number != version.number - 1
        nbytes = costs.nbytes if full else costs.delta_nbytes
        await self._uplink.carry(nbytes)
        await asyncio.sleep(costs.pull_s)
        return Pulled(
            manifest=_manifest(version, costs),
            nbytes=nbytes,
            full=full,
            pull_s=self._clock.now() - began_s,
            retries=0,
        )

    def swap(self, pulled: Pulled) -> None:
        self._number = pulled.manifest.version.number

    def close(self) -> None:
        pass
