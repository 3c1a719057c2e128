"""A simulated sharded trainer: the controller's real calls to its ranks, and ranks that die, hang, fail or are slow.

Every rank keeps a trainer, publishes its rows through a store of its own, and waits for the others in every collective
operation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.fault_simulation.components import WatchedTrainer
from tests.fault_simulation.guarding import Disk
from tests.fault_simulation.invariants import require
from tests.fault_simulation.pulled_weights import RankRows
from tests.fault_simulation.scenario import RankFault
from tests.fault_simulation.training_invariants import TrainingInvariants
from tidemill.core.errors import TidemillError, TrainerLost
from tidemill.core.records import Completion, Group, LogprobBuffer, PolicyVersion, StepMetrics, WeightManifest
from tidemill.runtime.cluster.rank_group import RankGroup
from tidemill.runtime.cluster.ray_calls import trainer_lost
from tidemill.runtime.cluster.ray_trainer import RayTrainer, Restored
from tidemill.runtime.cluster.wire import decode, encode
from tidemill.sim.costs import TrainerCosts
from tidemill.sim.simulated_trainer import START, SimulatedTrainer

T = TypeVar("T")

LATE_S = 30.0
"""Deadline of the ranks' collective operations, and of a rank whose peers have answered."""
LAG_S = 3.0


class RankFailed(TidemillError):
    """An unexpected exception in a rank, planned."""


class Peers:
    """The collective operations of all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lost = asyncio.Event()  # a connection of one of them
        self.files: dict[int, dict[int, PolicyVersion]] = {}  # of checkpoints that are being written: by step and rank
        self._waiting: dict[int, str] = {}  # operation by rank
        self._met = asyncio.Event()

    async def meet(self, index: int, operation: str) -> None:
        """Return when every rank is in the same operation.

        Raises:
            RankFailed: one of them died, or did not come in time.
        """
        self._waiting[index] = operation
        require(len(set(self._waiting.values())) == 1, f"the ranks are in different operations: {self._waiting}")
        met = self._met
        if len(self._waiting) == self.size:
            self._waiting, self._met = {}, asyncio.Event()
            met.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (met, self.lost)]
        try:
            await asyncio.wait(waits, timeout=LATE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if not met.is_set():
            raise RankFailed("connection closed by peer" if self.lost.is_set() else "timed out waiting for a peer")


class SimulatedRank:
    """Implements `runtime.cluster.wire.Caller`; calls of one rank run one after another."""

    def __init__(
        self,
        index: int,
        peers: Peers,
        trainer: SimulatedTrainer,
        rows: RankRows,
        *,
        disk: Disk,
        costs: TrainerCosts,
        fault: RankFault | None,
        saved: Callable[[int], None],
    ) -> None:
        self.index, self.trainer, self.struck = index, trainer, False
        self.killed = False
        self.rows = rows
        self._peers, self._disk, self._costs, self._saved = peers, disk, costs, saved
        self.fault, self._calls = fault, Counter[str]()
        self._compute, self._dead = asyncio.Lock(), asyncio.Event()

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T:
        if self._dead.is_set():
            raise self._lost()
        serving = asyncio.ensure_future(self._serve(method, *args))
        dying = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({serving, dying}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise self._lost()
            return decode(encode(serving.result()), kind)
        finally:
            for task in (serving, dying):
                task.cancel()
            await asyncio.gather(serving, dying, return_exceptions=True)

    def kill(self) -> None:
        self.killed = True
        self._die()

    def _die(self) -> None:
        self._dead.set()
        self._peers.lost.set()
        self.rows.lose()

    def _lost(self) -> TidemillError:
        return trainer_lost("its process was killed", "", role=f"trainer's rank {self.index}")

    async def _serve(self, method: str, *args: Any) -> object:
        self._calls[method] += 1
        async with self._compute:
            await self._strike(method, "before")
            answer: object = await getattr(self, f"_{method}")(*args)
            await self._strike(method, "after")
            return answer

    async def _strike(self, method: str, moment: str) -> None:
        fault = self.fault
        if fault is None or (fault.method, fault.call, fault.moment) != (method, self._calls[method], moment):
            return
        self.struck = True
        if fault.kind == "dies":
            self._die()
        if fault.kind in ("dies", "hangs"):
            await asyncio.Event().wait()
        if fault.kind == "raises":
            raise RankFailed("no space left on device")
        await asyncio.sleep(LAG_S)

    async def _meet(self, operation: str) -> None:
        await self._peers.meet(self.index, operation)

    async def _accumulate(self, group: bytes) -> None:
        await self._meet(f"forward {self._calls['accumulate']}")
        await self.trainer.accumulate(decode(group, Group))

    async def _commit(self, step: int) -> StepMetrics:
        await self._meet(f"reduce {step}")
        return await self.trainer.commit(step)

    async def _logprobs(self, completions: bytes) -> Sequence[LogprobBuffer]:
        await self._meet(f"logprobs {self._calls['logprobs']}")
        return await self.trainer.logprobs(decode(completions, list[Completion]))

    async def _save(self, step: int, score: float | None, pinned: int | None = None) -> None:
        """Every rank writes its rows; when all have, the first renames the folder."""
        await asyncio.sleep(self._costs.checkpoint_s())
        files = self._peers.files.setdefault(step, {})
        files[self.index] = self.trainer.version
        await self._meet(f"written {step}")
        if self.index == 0:
            right = dict.fromkeys(range(self._peers.size), self.trainer.version)
            require(files == right, f"checkpoint {step} has the files {files}")
            self._disk.keep(step, self.trainer.version, pinned)
            self._saved(step)
        await self._meet(f"renamed {step}")

    async def _steps(self) -> Sequence[int]:
        return sorted(self._disk.checkpoints)

    async def _restore_latest(self) -> Restored:
        await asyncio.sleep(self._costs.checkpoint_s())
        step = max(self._disk.checkpoints, default=0)
        await self._meet(f"restore {step}")
        self.trainer.version = self._disk.checkpoints.get(step, START)
        return Restored(step=step, version=self.trainer.version, warnings=())

    async def _publish(self, version: bytes) -> WeightManifest:
        return await self.rows.publish(decode(version, PolicyVersion), probed=lambda: self._meet("probe"))


class WatchedGroup(RankGroup):
    """The real calls to all ranks, after which every rank must have the same version."""

    def __init__(self, ranks: Sequence[SimulatedRank]) -> None:
        super().__init__(ranks, late_s=LATE_S)
        self.members = ranks

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T:
        answer = await super().call(method, *args, kind=kind, timeout_s=timeout_s)
        self._check(f"after `{method}`", [rank.trainer.version for rank in self.members])
        if method == "publish":
            self._check("published", [rank.rows.version for rank in self.members])
        return answer

    @staticmethod
    def _check(moment: str, versions: Sequence[PolicyVersion | None]) -> None:
        require(len(set(versions)) == 1, f"{moment}, the ranks have versions {versions}")

    def allows(self, error: Exception) -> bool:
        """Whether a planned fault of a rank explains this error; the other ranks must have been ended."""
        struck = [rank.fault for rank in self.members if rank.fault is not None and rank.struck]
        if not struck or struck[0].kind == "lags":
            return False
        require(all(rank.killed for rank in self.members), f"a rank runs after {error!r}")
        return isinstance(error, RankFailed if struck[0].kind == "raises" else TrainerLost)


class WatchedPublisher(RayTrainer):
    def __init__(self, group: WatchedGroup, training: TrainingInvariants) -> None:
        super().__init__(group, PolicyVersion(number=0, digest=""), warn=print)
        self._training = training

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        self._training.published(version)
        return await super().publish(version)


def ranks_of_life(
    rows: Sequence[RankRows],
    *,
    costs: TrainerCosts,
    training: TrainingInvariants,
    salt: str,
    disk: Disk,
    fault: RankFault | None,
    saved: Callable[[int], None],
) -> WatchedGroup:
    """The ranks of one life; the first one's training is watched."""
    peers = Peers(len(rows))

    def trainer(index: int) -> SimulatedTrainer:
        return WatchedTrainer(costs, training, salt=salt) if index == 0 else SimulatedTrainer(costs, salt=salt)

    return WatchedGroup(
        [
            SimulatedRank(
                index,
                peers,
                trainer(index),
                each,
                disk=disk,
                costs=costs,
                saved=saved,
                fault=fault if fault is not None and fault.rank % len(rows) == index else None,
            )
            for index, each in enumerate(rows)
        ]
    )
