"""Snapshots: the bytes of a version with every tensor at its offset, their checksums, and the transport interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tidemill.core.errors import WeightsError
from tidemill.core.records import TensorEntry, WeightManifest

Blob: TypeAlias = npt.NDArray[np.uint8]
"""Raw bytes, one-dimensional and contiguous. Receivers never write to one: the memory may be shared."""


class Missing(WeightsError):
    """No blob has that name, or it was deleted."""


class BlobSource(Protocol):
    """Immutable buffers by name. Names are never reused and are valid file names."""

    async def get(self, name: str) -> Blob:
        """Return a blob, possibly read-only, preferably aligned to 64 bytes.

        Raises:
            Missing: no blob has that name.
            WeightsError: it cannot be read.
        """

    async def close(self) -> None:
        """Release connections; the publisher's end deletes all blobs."""


class Transport(BlobSource, Protocol):
    """The publisher's end. Deleting a blob does not invalidate buffers that readers already hold."""

    @property
    def zero_copy(self) -> bool:
        """Whether `get` is free for every reader regardless of size; deltas are then not written."""

    async def put(self, name: str, blob: Blob) -> None:
        """Store a blob atomically for all readers. The caller must not change `blob` afterwards."""

    async def delete(self, name: str) -> None:
        """Delete a blob; does nothing if it does not exist."""


ALIGNMENT = 64
"""Alignment in bytes of buffers and of the tensors in them: that of torch, so that its kernels take the same path."""


class Damaged(WeightsError):
    """Bytes differ from the published ones; pulling again may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A verified version, or one rank's rows of it. `buffer` is read-only while in use."""

    manifest: WeightManifest
    buffer: Blob  # uint8 [manifest.nbytes]
    file: Path | None = None  # the same bytes in shared memory; it is not deleted while the snapshot is in use


def allocate(nbytes: int) -> Blob:
    """Return an aligned, uninitialised buffer."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def aligned(buffer: Blob) -> Blob:
    """Return `buffer`, copied to an aligned address if necessary."""
    if buffer.ctypes.data % ALIGNMENT == 0:
        return buffer
    copy = allocate(len(buffer))
    copy[:] = buffer
    return copy


def checksum(data: Blob) -> int:
    """xxh3_64 of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def sealed(tensors: Sequence[TensorEntry], buffer: Blob) -> tuple[TensorEntry, ...]:
    """Return the entries with checksums of their bytes in `buffer`."""
    return tuple(msgspec.structs.replace(entry, checksum=checksum(_bytes(entry, buffer))) for entry in tensors)


def digest_of(tensors: Sequence[TensorEntry]) -> str:
    """32 hex digits (xxh3-128) over name, dtype, shape and checksum of every tensor, in order."""
    rows = [(entry.name, entry.dtype, entry.shape, entry.checksum) for entry in tensors]
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(rows))


def verify(manifest: WeightManifest, buffer: Blob) -> None:
    """Raises Damaged: a tensor differs from the published one; names version and tensor."""
    name = f"version {manifest.version.number}"
    if len(buffer) != manifest.nbytes:
        raise Damaged(f"{name}: the snapshot has {len(buffer)} bytes, not {manifest.nbytes}")
    for entry in manifest.tensors:
        if checksum(_bytes(entry, buffer)) != entry.checksum:
            raise Damaged(f"{name}: tensor {entry.name} has a different checksum than published")
    if digest_of(manifest.tensors) != manifest.digest:
        raise Damaged(f"{name}: the digest is not {manifest.digest}")


PARTS = 16
"""Workers sum their weights in this many parts, one part per report."""
MASK64 = (1 << 64) - 1
_WORD = 8


def part_ranges(sizes: Sequence[int], part: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, first byte, end) of one of `PARTS` equal parts of tensors of these bytes, laid end to end; words of a
    tensor are not divided."""
    first, last = (sum(sizes) * at // PARTS for at in (part, part + 1))
    offset = 0
    for tensor, size in enumerate(sizes):
        start, end = (size if at >= offset + size else max(at - offset, 0) // _WORD * _WORD for at in (first, last))
        if start < end:
            yield tensor, start, end
        offset += size


def part_sums(tensors: Sequence[TensorEntry], buffer: Blob) -> tuple[int, ...]:
    """For each part of a snapshot the sum of its 64-bit words modulo 2^64; the last word of a tensor is padded.

    Any flipped bit changes it. It takes as long as reading the memory, also on a GPU, where no hash is available.
    """
    return _sums([[_bytes(entry, buffer)] for entry in tensors])


def joined_part_sums(parts: Sequence[Snapshot]) -> tuple[int, ...]:
    """The `part_sums` of all rows, of which each part has some of every tensor; copies nothing."""
    tensors = ([_bytes(entry, part.buffer) for entry in part.manifest.tensors] for part in parts)
    return _sums(list(zip(*tensors, strict=True)))


def _sums(tensors: Sequence[Sequence[Blob]]) -> tuple[int, ...]:
    """The `part_sums` of tensors whose bytes are in consecutive pieces."""
    sizes, sums = [sum(map(len, pieces)) for pieces in tensors], list[int]()
    for part in range(PARTS):
        ranges = part_ranges(sizes, part)
        sums.append(sum(_word_sum(tensors[at], start, end) for at, start, end in ranges) & MASK64)
    return tuple(sums)


def _word_sum(pieces: Sequence[Blob], start: int, end: int) -> int:
    total = offset = 0
    for piece in pieces:
        data = piece[max(start - offset, 0) : max(end - offset, 0)]
        place = max(start, offset) % _WORD  # of the first byte in its word
        head, tail = data[: -place % _WORD], data[-place % _WORD :]
        words = len(tail) // _WORD * _WORD
        total += int.from_bytes(head.tobytes(), "little") << 8 * place
        total += int(np.add.reduce(tail[:words].view(np.uint64), dtype=np.uint64))
        total += int.from_bytes(tail[words:].tobytes(), "little")
        offset += len(piece)
    return total


def _bytes(entry: TensorEntry, buffer: Blob) -> Blob:
    return buffer[entry.offset : entry.offset + entry.nbytes]


class BlobsInMemory:
    """Blobs in the publisher's memory, marked read-only."""

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}

    async def put(self, name: str, blob: Blob) -> None:
        kept = blob.view()
        kept.flags.writeable = False
        self.blobs[name] = kept

    async def get(self, name: str) -> Blob:
        if name not in self.blobs:
            raise Missing(f"there is no {name}")
        return self.blobs[name]

    async def delete(self, name: str) -> None:
        self.blobs.pop(name, None)

    async def close(self) -> None:
        self.blobs.clear()


class MemoryTransport(BlobsInMemory):
    """A `Transport` within one process.

    Args:
        zero_copy: False makes `get` copy, like a transfer between machines.
    """

    def __init__(self, *, zero_copy: bool = True) -> None:
        super().__init__()
        self.zero_copy = zero_copy

    async def get(self, name: str) -> Blob:
        blob = await super().get(name)
        if not self.zero_copy:
            blob, source = allocate(len(blob)), blob
            blob[:] = source
        return blob
