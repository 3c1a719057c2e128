"""Real weight bytes, published and pulled by the real code; a worker's tokens depend on the bytes it pulled."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from tests.fault_simulation.training_invariants import TrainingInvariants
from tests.published import rows_of_rank
from tidemill.core.records import (
    LogprobBuffer,
    PolicyVersion,
    Pulled,
    TensorEntry,
    WeightManifest,
    pack_logprobs,
    pack_tokens,
)
from tidemill.sim.simulated_worker import SimulatedWorker
from tidemill.weights.delta import Threads
from tidemill.weights.puller import Puller, PullerGroup
from tidemill.weights.snapshot import Blob, Damaged, MemoryTransport, Snapshot, allocate
from tidemill.weights.store import WeightStore

T = TypeVar("T")

PROBE = pack_tokens(range(9))
NAME_BYTES, REST_BYTES = 16, 4096
CHANGED = 24
"""Bytes of the rest in which a version differs from the common ones."""
LAYOUT = (
    TensorEntry(name="name", dtype="float32", shape=(4,), offset=0, nbytes=NAME_BYTES, checksum=0),
    TensorEntry(name="rest", dtype="float32", shape=(REST_BYTES // 4,), offset=64, nbytes=REST_BYTES, checksum=0),
)
WRONG = "wrong bytes"


class PromptCompute:
    """Implements `core.protocols.Compute` without delay, and notes damage that it met."""

    def __init__(self) -> None:
        self.damage: list[str] = []

    async def run(self, function: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        try:
            return function()
        except Damaged as error:
            self.damage.append(str(error))
            raise


@lru_cache(maxsize=256)
def weights_of(version: PolicyVersion) -> Blob:
    """Weights that contain the version's digest; few other bytes differ between versions."""
    blob = allocate(LAYOUT[-1].offset + REST_BYTES)
    blob[:] = np.arange(len(blob)) % 251
    blob[:NAME_BYTES] = np.frombuffer(version.digest.encode().ljust(NAME_BYTES)[:NAME_BYTES], np.uint8)
    rng = random.Random(version.digest)
    for _ in range(CHANGED):
        blob[64 + rng.randrange(REST_BYTES)] ^= 1
    return blob


@lru_cache(maxsize=256)
def probe_logprobs(digest: str) -> LogprobBuffer:
    """Probe logprobs as a function of the weights."""
    numbers = hashlib.blake2b(digest.encode(), digest_size=8).digest()
    return pack_logprobs(-number / 16 for number in numbers)


class StoredPublisher:
    """Implements `core.protocols.Publisher` over a real store."""

    def __init__(self, store: WeightStore, training: TrainingInvariants, *, seconds: float) -> None:
        self.store, self._training, self._seconds = store, training, seconds

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        self._training.published(version)
        latest = self.store.latest
        if latest is not None and latest.version == version:
            return latest
        await asyncio.sleep(self._seconds)
        await self.store.make_room()
        return await self.store.publish(
            version, LAYOUT, weights_of(version), probe_ids=PROBE, probe_logprobs=probe_logprobs(version.digest)
        )

    async def close(self) -> None:
        await self.store.close()


class RankRows:
    """Publishes the rows of one rank through a store of its own.

    Args:
        index: of the rank, of `size`.
    """

    def __init__(self, index: int, size: int, transport: MemoryTransport, *, threads: Threads, seconds: float) -> None:
        self.transport = transport
        self._store = WeightStore(transport, compute=PromptCompute(), threads=threads)
        self._seconds = seconds
        self._index, self._size = index, size

    @property
    def version(self) -> PolicyVersion | None:
        return self._store.latest.version if self._store.latest else None

    async def publish(self, version: PolicyVersion, *, probed: Callable[[], Awaitable[None]]) -> WeightManifest:
        latest = self._store.latest
        if latest is not None and latest.version == version:
            return latest
        await asyncio.sleep(self._seconds)
        await self._store.make_room()
        layout, rows = rows_of_rank(LAYOUT, weights_of(version), self._index, self._size)
        await probed()
        return await self._store.publish(
            version, layout, rows, probe_ids=PROBE, probe_logprobs=probe_logprobs(version.digest)
        )

    def lose(self) -> None:
        """Its process ended, and its objects with it."""
        self.transport.blobs.clear()


class PulledBytes:
    """Implements `core.protocols.WeightSource` over a real puller.

    Args:
        wrong: names the versions whose bytes were not those published.
    """

    def __init__(self, puller: Puller | PullerGroup, wrong: list[str]) -> None:
        self.parts: Sequence[Snapshot] = ()
        self._puller, self._wrong = puller, wrong

    async def prepare(self, version: PolicyVersion) -> Pulled:
        return await self._puller.prepare(version)

    def swap(self, pulled: Pulled) -> None:
        self._puller.swap(pulled, self._bind)

    def _bind(self, parts: Sequence[Snapshot]) -> None:
        self.parts = parts

    def close(self) -> None:
        self._puller.close()

    def digest(self, version: PolicyVersion) -> str:
        """The version encoded in the bytes, given the announced one."""
        assert self.parts, "no weights were bound"
        right = weights_of(version)
        tensors = zip(*(_tensors(part.manifest.tensors, part.buffer) for part in self.parts), strict=True)
        same = all(map(np.array_equal, map(np.concatenate, tensors), _tensors(LAYOUT, right)))
        if not same:
            self._wrong.append(f"version {version.number}")
        return version.digest if same else WRONG


def _tensors(layout: Sequence[TensorEntry], buffer: Blob) -> list[Blob]:
    return [buffer[entry.offset : entry.offset + entry.nbytes] for entry in layout]


class PullingWorker(SimulatedWorker):
    """A worker that generates from the bytes it pulled, or from wrong ones."""

    def __init__(self, *args: Any, bytes_: PulledBytes, wrongly: bool, **more: Any) -> None:
        super().__init__(*args, source=bytes_, **more)
        self._bytes, self._wrongly = bytes_, wrongly

    def computes_with(self, version: PolicyVersion) -> PolicyVersion:
        digest = WRONG if self._wrongly else self._bytes.digest(version)
        return PolicyVersion(number=version.number, digest=digest)

    def probe(self, right: LogprobBuffer) -> LogprobBuffer:
        return probe_logprobs(self.engine.computes_with.digest)
