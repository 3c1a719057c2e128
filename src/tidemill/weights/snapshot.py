"""A version's bytes with every tensor at its offset, and the interface that moves them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tidemill.core.errors import WeightsError
from tidemill.core.records import TensorEntry, WeightManifest

Blob: TypeAlias = npt.NDArray[np.uint8]
"""Raw bytes, one-dimensional and contiguous. Whoever gets one never writes to it: others may hold the same memory."""


class Missing(WeightsError):
    """There is no blob of that name (any more)."""


class Transport(Protocol):
    """Immutable buffers by name. Names are unique for ever, and fit a file name.

    A reader keeps what it got: deleting a blob never disturbs who holds it.
    """

    @property
    def zero_copy(self) -> bool:
        """`get` costs (nearly) nothing whatever the size, for every reader: there is no use for deltas."""

    async def put(self, name: str, blob: Blob) -> None:
        """Returns when every reader can get all of it; before, none can get any. The caller never changes `blob`."""

    async def get(self, name: str) -> Blob:
        """May be read-only, and should be aligned to 64 bytes.

        Raises:
            Missing: there is none of that name.
            WeightsError: it cannot be read.
        """

    async def delete(self, name: str) -> None:
        """Harmless when there is none of that name."""

    async def close(self) -> None:
        """Of the owner's side: delete everything."""


ALIGNMENT = 64
"""Of buffers and of the tensors in them, in bytes: as torch's own memory, so that its kernels take the same path."""


class Damaged(WeightsError):
    """Bytes that are not what was published; they may come whole when pulled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A verified version. Nobody writes to `buffer` while anyone may read it."""

    manifest: WeightManifest
    buffer: Blob  # uint8 [manifest.nbytes]


def allocate(nbytes: int) -> Blob:
    """An aligned buffer, contents arbitrary."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def aligned(buffer: Blob) -> Blob:
    """The same bytes at an aligned address: `buffer` itself where it is."""
    if buffer.ctypes.data % ALIGNMENT == 0:
        return buffer
    copy = allocate(len(buffer))
    copy[:] = buffer
    return copy


def checksum(data: Blob) -> int:
    """xxh3_64 of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def sealed(tensors: Sequence[TensorEntry], buffer: Blob) -> tuple[TensorEntry, ...]:
    """The same entries with the checksums of what stands in `buffer`."""
    return tuple(msgspec.structs.replace(entry, checksum=checksum(_bytes(entry, buffer))) for entry in tensors)


def digest_of(tensors: Sequence[TensorEntry]) -> str:
    """32 hex digits (xxh3-128) over name, dtype, shape and checksum of every tensor, in order."""
    rows = [(entry.name, entry.dtype, entry.shape, entry.checksum) for entry in tensors]
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(rows))


def verify(manifest: WeightManifest, buffer: Blob) -> None:
    """
    Raises:
        Damaged: naming the version, and the first tensor that is not what was published.
    """
    name = f"version {manifest.version.number}"
    if len(buffer) != manifest.nbytes:
        raise Damaged(f"{name}: the snapshot has {len(buffer)} bytes, not {manifest.nbytes}")
    for entry in manifest.tensors:
        if checksum(_bytes(entry, buffer)) != entry.checksum:
            raise Damaged(f"{name}: tensor {entry.name} does not have the checksum it was published with")
    if digest_of(manifest.tensors) != manifest.digest:
        raise Damaged(f"{name}: the tensors together do not have the digest {manifest.digest}")


def _bytes(entry: TensorEntry, buffer: Blob) -> Blob:
    return buffer[entry.offset : entry.offset + entry.nbytes]


class MemoryTransport:
    """Implements `weights.transport.Transport`: `get` returns the very memory that was put, marked read-only.

    Args:
        zero_copy: False makes `get` copy, as a transfer between machines would.
    """

    def __init__(self, *, zero_copy: bool = True) -> None:
        self.zero_copy = zero_copy
        self.blobs: dict[str, Blob] = {}
        self.reads: list[str] = []
        self.delay_s = 0.0  # of every read
        self._faults: dict[str, deque[Callable[[Blob], Blob]]] = {}

    def spoil(self, kind: str, fault: Callable[[Blob], Blob], *, times: int = 1) -> None:
        """Let the next reads of names that end in `kind` ("manifest", "snapshot", "delta") return `fault(blob)`."""
        self._faults.setdefault(kind, deque()).extend([fault] * times)

    async def put(self, name: str, blob: Blob) -> None:
        kept = blob.view()
        kept.flags.writeable = False
        self.blobs[name] = kept

    async def get(self, name: str) -> Blob:
        self.reads.append(name)
        await asyncio.sleep(self.delay_s)
        if name not in self.blobs:
            raise Missing(f"there is no {name}")
        blob = self.blobs[name]
        if not self.zero_copy:
            blob, source = allocate(len(blob)), blob
            blob[:] = source
        faults = self._faults.get(name.rsplit(".", 1)[-1])
        return faults.popleft()(blob) if faults else blob

    async def delete(self, name: str) -> None:
        self.blobs.pop(name, None)

    async def close(self) -> None:
        self.blobs.clear()


def torn(blob: Blob) -> Blob:
    """The first half, as when the writer died."""
    return blob[: len(blob) // 2]


def corrupt(blob: Blob) -> Blob:
    """One bit is wrong."""
    wrong = allocate(len(blob))
    wrong[:] = blob
    wrong[len(wrong) // 2] ^= 4
    return wrong
