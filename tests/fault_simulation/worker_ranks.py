"""A worker of several GPUs: the processes of its engine, which read a version from files that the machine's workers
share, and may die or hang in a step or while the weights are swapped.

As in vLLM, a step or a load is a call to all ranks that returns when the last one has answered. A dead rank is noticed
some time later; a call to a rank that hangs never returns.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tests.fault_simulation.acting import TurnEngine
from tests.fault_simulation.pulled_weights import LAYOUT, PulledBytes, PullingWorker, tensors_of, weights_of
from tests.fault_simulation.scenario import WorkerRankFault
from tidemill.core.errors import WorkerLost
from tidemill.core.records import (
    GenerateRequest,
    LogprobBuffer,
    PolicyVersion,
    Pulled,
    SampleId,
    TokenBuffer,
    WorkerReport,
)
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.weights.node_folder import PARTIAL, NodePuller
from tidemill.weights.snapshot import Snapshot

T = TypeVar("T")

READ_S = 0.1
"""Longest time until a rank opens the files of a version, after the one before it."""
NO_VERSION = PolicyVersion(number=-1, digest="")


class Stopped(BaseException):
    """Ends a thread whose process was killed."""


class EngineThread:
    """Runs one call at a time in a thread that takes turns with the loop: time passes only in `pause`."""

    def __init__(self) -> None:
        self._turn, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._wait_s = 0.0
        self._stopped = asyncio.Event()

    def pause(self, seconds: float) -> None:
        """Wait; called in the thread."""
        self._wait_s = seconds
        self._paused.release()
        self._turn.acquire()
        if self._stopped.is_set():
            raise Stopped

    async def run(self, function: Callable[[], T]) -> T:
        """Raises Stopped: its process was killed meanwhile."""
        results: list[T] = []
        errors: list[BaseException] = []

        def called() -> None:
            self._turn.acquire()
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
            self._paused.release()

        thread = threading.Thread(target=called, daemon=True)
        thread.start()
        try:
            while not self._has_ended(results, errors):
                try:
                    async with asyncio.timeout(self._wait_s if self._wait_s < math.inf else None):
                        await self._stopped.wait()
                except TimeoutError:
                    pass
        except asyncio.CancelledError:
            self.stop()
            self._has_ended(results, errors)
            raise
        finally:
            thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def stop(self) -> None:
        """End the call that runs, at its pause."""
        self._stopped.set()

    def _has_ended(self, *ends: Sequence[Any]) -> bool:
        self._turn.release()
        self._paused.acquire()
        return any(ends)


class WorkerRanks:
    """The ranks of one engine.

    Args:
        wrong: names the versions that a rank did not read as they were published.
    """

    def __init__(
        self,
        size: int,
        faults: Sequence[WorkerRankFault],
        *,
        rng: random.Random,
        thread: EngineThread,
        fails: Callable[[WorkerRankFault], None],
        wrong: list[str],
    ) -> None:
        self.versions = [NO_VERSION] * size
        self.failed: set[int] = set()
        self._faults, self._rng, self._thread, self._fails, self._wrong = faults, rng, thread, fails, wrong
        self._loads = 0

    def bind(self, parts: Sequence[Snapshot]) -> None:
        """Every rank reads the files, in any order; returns when all have. Called in the engine's thread."""
        self._loads += 1
        size = len(self.versions)
        for rank in self._rng.sample(range(size), size):
            self._thread.pause(self._rng.uniform(0.0, READ_S))
            for fault in self._faults:
                if fault.load == self._loads and fault.rank % size == rank:
                    self.failed.add(rank)
                    self._fails(fault)
            if self.failed:
                self._thread.pause(math.inf)
            self.load(rank, parts)

    def load(self, rank: int, parts: Sequence[Snapshot]) -> None:
        self.versions[rank] = self._read(parts)

    def check_step(self, version: PolicyVersion) -> None:
        """All ranks take part in a step, with the same version; an exception would end the worker only."""
        if self.failed or set(self.versions) != {version}:
            numbers, failed = [each.number for each in self.versions], sorted(self.failed)
            self._wrong.append(f"a step of version {version.number} with ranks of {numbers}, failed are {failed}")

    def _read(self, parts: Sequence[Snapshot]) -> PolicyVersion:
        version = parts[0].manifest.version
        rows = []
        for part in parts:
            assert part.file is not None
            try:
                blob = np.fromfile(part.file, np.uint8)
            except FileNotFoundError:
                self._wrong.append(f"version {version.number}: a file was deleted before a rank had read it")
                return NO_VERSION
            rows.append(tensors_of(part.manifest.tensors, blob))
        right = tensors_of(LAYOUT, weights_of(version))
        if not all(map(np.array_equal, map(np.concatenate, zip(*rows, strict=True)), right)):
            self._wrong.append(f"version {version.number}: a rank read other bytes")
        return version


class RankSteps(SimulatedEngine):
    """An engine that steps with ranks."""

    ranks: WorkerRanks
    halted = False

    def halt(self, now_s: float) -> None:
        """Take no step until `resume`."""
        self.advance(now_s)
        self.halted = True

    def resume(self, now_s: float) -> None:
        self.advance(now_s)
        self.halted = False

    def advance(self, now_s: float) -> None:
        if self.halted:
            self._until_s = max(self._until_s, now_s)
        else:
            super().advance(now_s)

    def _decode(self, steps: int) -> None:
        if steps:
            self.ranks.check_step(self.version)
        super()._decode(steps)


class RankedEngine(RankSteps, SimulatedEngine):
    """Generates completions."""


class RankedTurnEngine(RankSteps, TurnEngine):
    """Generates turns of agents."""


class RankedBytes(PulledBytes):
    """Implements `core.protocols.WeightSource`: ranks read what pullers of the machine's folder hold."""

    ranks: WorkerRanks
    prepares = False

    def __init__(self, pullers: Sequence[NodePuller], puller: Any, wrong: list[str]) -> None:
        super().__init__(puller, wrong)
        self._pullers = pullers

    async def prepare(self, version: PolicyVersion) -> Pulled:
        self.prepares = True
        try:
            return await super().prepare(version)
        finally:
            self.prepares = False

    def _bind(self, parts: Sequence[Snapshot]) -> None:
        self.ranks.bind(parts)
        super()._bind(parts)

    def close(self) -> None:
        """The process was killed: the kernel releases its locks; files, and one that it was writing, stay."""
        for puller in self._pullers:
            while puller._files:
                puller._files.popitem()[1].close()
            folder: Path = puller._folder.path
            if self.prepares and folder.is_dir():
                (folder / f"killed{PARTIAL}").write_bytes(b"half")


class RankedWorker(PullingWorker):
    """A worker whose engine is several processes.

    Args:
        after: calls a function in some seconds.
        wrong: see `WorkerRanks`.
    """

    engine: RankSteps

    def __init__(
        self,
        engine: RankSteps,
        *,
        size: int,
        faults: Sequence[WorkerRankFault],
        after: Callable[[float, Callable[[], object]], None],
        rng: random.Random,
        bytes_: RankedBytes,
        wrong: list[str],
        **more: Any,
    ) -> None:
        super().__init__(engine, bytes_=bytes_, **more)
        self._after, self._thread, self._loop = after, EngineThread(), asyncio.get_running_loop()
        self.ranks = WorkerRanks(size, faults, rng=rng, thread=self._thread, fails=self._need, wrong=wrong)
        engine.ranks = bytes_.ranks = self.ranks
        self._free = asyncio.Event()  # the engine's thread waits for no rank
        self._free.set()
        self.fault: WorkerRankFault | None = None  # of a rank that has failed
        self.blocked_s = math.inf  # since when a call waits for it
        for fault in faults:
            if not fault.load:
                after(fault.at_s, lambda fault=fault: self._fail_in_step(fault))  # type: ignore[misc]

    @property
    def ended(self) -> bool:
        return self._dead or self._failure is not None

    def _fail_in_step(self, fault: WorkerRankFault) -> None:
        if self.ended or self.fault is not None or not self._free.is_set():
            return
        self.engine.halt(self._loop.time())
        self.ranks.failed.add(fault.rank % len(self.ranks.versions))
        self.fault = fault
        self._step()

    def _step(self) -> None:
        """A step of an engine with samples needs a rank that has failed."""
        if self.fault is not None and self.engine.running + self.engine.queued:
            self._need(self.fault)

    def _need(self, fault: WorkerRankFault) -> None:
        if self.blocked_s == math.inf:
            self.fault, self.blocked_s = fault, self._loop.time()
            self._block(fault)

    def _block(self, fault: WorkerRankFault) -> None:
        """Answer nothing any more; a dead rank is noticed."""
        self._free.clear()
        if fault.kind == "dies":
            lost = WorkerLost(f"rank {fault.rank % len(self.ranks.versions)} of its engine has ended")
            self._loop.call_soon(self._after, fault.noticed_s, lambda: self.fail(lost))

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._release()

    def kill(self) -> None:
        super().kill()
        self._release()

    def _release(self) -> None:
        self._free.set()
        self._thread.stop()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await self._free.wait()
        await super().submit(requests)
        self._step()

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await self._free.wait()
        await super().abort(sample_ids)

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        await self._free.wait()
        return await super().run_probe(token_ids)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        deadline_s = self._loop.time() + timeout_s
        report = None
        if await self._is_free(deadline_s):
            report = await super().next_report(max(0.0, deadline_s - self._loop.time()))
        if self.blocked_s < math.inf:  # tokens since the last report are lost
            report = None
            if await self._is_free(deadline_s):
                self._check()
        return report

    async def _is_free(self, deadline_s: float) -> bool:
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._free.wait()
        except TimeoutError:
            return False
        return True

    async def _swap(self, pulled: Pulled) -> None:
        """Between two steps; ends the worker if a rank fails, since the others may have the new version."""
        await self._free.wait()
        self._check()
        if self.fault is not None:
            self._need(self.fault)
            await self._free.wait()
            self._check()
        self.engine.halt(self._loop.time())
        self._free.clear()
        try:
            await self._thread.run(lambda: self._bytes.swap(pulled))
        except Stopped:
            self._check()
            raise
        self.engine.resume(self._loop.time())
        self._free.set()
