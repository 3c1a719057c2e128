"""A version's bytes: one buffer with every tensor at its offset, and how one knows that they are the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from tidemill.core.errors import WeightsError
from tidemill.core.records import TensorEntry, WeightManifest
from tidemill.weights.transport import Blob

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
