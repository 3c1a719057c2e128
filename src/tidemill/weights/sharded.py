"""Puts the snapshots of several ranks, which hold consecutive rows of every tensor, together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tidemill.core.errors import WeightsError
from tidemill.core.records import PolicyVersion, Pulled, TensorEntry, WeightManifest
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import ALIGNMENT, Blob, Snapshot, allocate


def whole_manifest(parts: Sequence[WeightManifest]) -> WeightManifest:
    """The manifest of all rows, with the layout of an unsharded snapshot. Checksums are those of the parts only.

    Raises:
        WeightsError: the parts are of different versions or models.
    """
    first = parts[0]
    names = [entry.name for entry in first.tensors]
    if any(part.version != first.version or [entry.name for entry in part.tensors] != names for part in parts):
        raise WeightsError(f"version {first.version.number}: the ranks published different versions or models")
    tensors, offset = list[TensorEntry](), 0
    for entries in zip(*(part.tensors for part in parts), strict=True):
        nbytes = sum(entry.nbytes for entry in entries)
        shape = (sum(entry.shape[0] for entry in entries), *entries[0].shape[1:])
        tensors.append(msgspec.structs.replace(entries[0], shape=shape, offset=offset, nbytes=nbytes, checksum=0))
        offset += math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
    total = max((entry.offset + entry.nbytes for entry in tensors), default=0)
    return msgspec.structs.replace(first, nbytes=total, tensors=tuple(tensors), delta=None)


def assembled(parts: Sequence[Snapshot], buffer: Blob | None = None) -> Snapshot:
    """The snapshot of all rows, bytes as an unsharded one has them.

    Args:
        buffer: of the same model, overwritten; None allocates one.
    """
    manifest = whole_manifest([part.manifest for part in parts])
    if buffer is None:
        buffer = allocate(manifest.nbytes)
        buffer[:] = 0  # between the tensors
    rows = zip(*(part.manifest.tensors for part in parts), strict=True)
    for whole, entries in zip(manifest.tensors, rows, strict=True):
        offset = whole.offset
        for part, entry in zip(parts, entries, strict=True):
            np.copyto(buffer[offset : offset + entry.nbytes], part.buffer[entry.offset : entry.offset + entry.nbytes])
            offset += entry.nbytes
    return Snapshot(manifest=manifest, buffer=buffer)


class PullerGroup:
    """Pulls a version from every rank at the same time; has the interface of `Puller`.

    Args:
        pullers: one for each rank, in their order.
    """

    def __init__(self, pullers: Sequence[Puller]) -> None:
        self._pullers = pullers
        self._ready: tuple[Pulled, Sequence[Pulled]] | None = None
        self._buffer: Blob | None = None

    async def prepare(self, version: PolicyVersion) -> Pulled:
        """Raises WeightsError: a part cannot be pulled; the version in use is unchanged."""
        self._ready = None
        # All of them end before an error is raised: a puller prepares one version at a time.
        pulls = (puller.prepare(version) for puller in self._pullers)
        parts: list[Pulled] = []
        for result in await asyncio.gather(*pulls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            parts.append(result)
        pulled = Pulled(
            manifest=whole_manifest([part.manifest for part in parts]),
            nbytes=sum(part.nbytes for part in parts),
            full=any(part.full for part in parts),
            pull_s=max(part.pull_s for part in parts),
            retries=max(part.retries for part in parts),
        )
        self._ready = pulled, parts
        return pulled

    def swap(self, pulled: Pulled, bind: Callable[[Snapshot], None]) -> None:
        """Put the parts together, in the memory of the version in use, and call `bind`; see `Puller.swap`."""
        if self._ready is None or self._ready[0] is not pulled:
            raise WeightsError(f"version {pulled.manifest.version.number} is not the last prepared version")
        snapshots: list[Snapshot] = []
        for puller, part in zip(self._pullers, self._ready[1], strict=True):
            puller.swap(part, snapshots.append)
        whole = assembled(snapshots, self._buffer)
        self._buffer = whole.buffer
        bind(whole)

    def close(self) -> None:
        """Release every buffer."""
        self._ready = self._buffer = None
        for puller in self._pullers:
            puller.close()
