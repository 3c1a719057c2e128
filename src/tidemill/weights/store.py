"""Publishes immutable versions with manifests, atomically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from tidemill.core.errors import WeightsError
from tidemill.core.protocols import Compute
from tidemill.core.records import DeltaEntry, LogprobBuffer, PolicyVersion, TensorEntry, TokenBuffer, WeightManifest
from tidemill.weights.delta import INLINE, Threads, encode_delta
from tidemill.weights.snapshot import Blob, Damaged, Transport, checksum, digest_of, part_sums, sealed

BASE = PolicyVersion(number=-1, digest="base")
"""The version number of the base model that all adapter versions share."""
_CHECKSUM_BYTES = 8


def manifest_name(version: PolicyVersion) -> str:
    return f"{version.number}-{version.digest}.manifest"


def snapshot_name(version: PolicyVersion) -> str:
    return f"{version.number}-{version.digest}.snapshot"


def delta_name(version: PolicyVersion) -> str:
    """Name of the delta from the previous version to `version`."""
    return f"{version.number}-{version.digest}.delta"


def pack_manifest(manifest: WeightManifest) -> Blob:
    body = msgspec.msgpack.encode(manifest)
    mark = checksum(np.frombuffer(body, np.uint8)).to_bytes(_CHECKSUM_BYTES, "little")
    return np.frombuffer(mark + body, np.uint8)


def unpack_manifest(blob: Blob, *, of: str) -> WeightManifest:
    """Decode a manifest.

    Args:
        of: name of the version in errors.

    Raises:
        Damaged: torn or corrupt.
    """
    mark, body = blob[:_CHECKSUM_BYTES], blob[_CHECKSUM_BYTES:]
    if len(mark) < _CHECKSUM_BYTES or checksum(body) != int.from_bytes(mark.tobytes(), "little"):
        raise Damaged(f"the manifest of {of} is torn or corrupt ({len(blob)} bytes)")
    return msgspec.msgpack.decode(body.tobytes(), type=WeightManifest)


SNAPSHOTS_KEPT = 2
DELTAS_KEPT = 8
"""A puller that missed some versions applies a chain of deltas."""


@dataclass(slots=True)
class _Published:
    version: PolicyVersion
    whole: bool = True  # its snapshot still exists


class WeightStore:
    """Publishes versions to a transport. The manifest is written last, so an interrupted publish is invisible.

    Keeps the snapshots of the newest two versions, so that workers can pull one while the next is written, and pinned
    ones.

    Args:
        compute: computes checksums and deltas.
        threads: share the work on a delta.
    """

    def __init__(self, transport: Transport, *, compute: Compute, threads: Threads = INLINE) -> None:
        self.transport = transport
        self.latest: WeightManifest | None = None
        self._compute, self._threads = compute, threads
        self._published: list[_Published] = []  # oldest first
        self._pins: Counter[PolicyVersion] = Counter()
        self._unfinished: list[str] = []  # blobs of an unfinished publish
        self._base_digest = ""

    @contextmanager
    def pinned(self, version: PolicyVersion) -> Iterator[None]:
        """Keep a version within the block."""
        self._pins[version] += 1
        try:
            yield
        finally:
            self._pins -= Counter([version])

    async def make_room(self) -> None:
        """Delete all snapshots but the newest and pinned ones, before a new one is written."""
        await self._delete_unfinished()
        await self._retire(SNAPSHOTS_KEPT - 1)

    async def publish_base(self, tensors: Sequence[TensorEntry], snapshot: Blob) -> WeightManifest:
        """Publish the base of all adapter versions as version `BASE`, before the first of them. It is never deleted."""
        await self._delete_unfinished()
        entries = await self._compute.run(lambda: sealed(tensors, snapshot))
        manifest = WeightManifest(
            version=BASE,
            digest=digest_of(entries),
            nbytes=len(snapshot),
            tensors=entries,
            part_sums=await self._compute.run(lambda: part_sums(tensors, snapshot)),
        )
        await self._put(snapshot_name(BASE), snapshot)
        await self._put(manifest_name(BASE), pack_manifest(manifest))
        self._unfinished.clear()
        self._base_digest = manifest.digest
        return manifest

    async def publish(
        self,
        version: PolicyVersion,
        tensors: Sequence[TensorEntry],
        snapshot: Blob,
        *,
        probe_ids: TokenBuffer = b"",
        probe_logprobs: LogprobBuffer = b"",
        probe_slack: float = 0.0,
    ) -> WeightManifest:
        """Publish a version; return when it can be pulled.

        Args:
            tensors: the layout of `snapshot`; checksums are added here.
            snapshot: aligned; must not change afterwards.
        """
        await self._delete_unfinished()
        entries = await self._compute.run(lambda: sealed(tensors, snapshot))
        digest = digest_of(entries)
        delta = None if self.transport.zero_copy else await self._delta(entries, snapshot)
        manifest = WeightManifest(
            version=version,
            digest=digest,
            nbytes=len(snapshot),
            tensors=entries,
            delta=delta[0] if delta else None,
            base_digest=self._base_digest,
            probe_ids=probe_ids,
            probe_logprobs=probe_logprobs,
            probe_slack=probe_slack,
            part_sums=await self._compute.run(lambda: part_sums(tensors, snapshot)),
        )
        await self._put(snapshot_name(version), snapshot)
        if delta:
            await self._put(delta_name(version), delta[1])
        await self._put(manifest_name(version), pack_manifest(manifest))
        self._unfinished.clear()
        self._published.append(_Published(version))
        self.latest = manifest
        await self._retire(SNAPSHOTS_KEPT)
        return manifest

    async def close(self) -> None:
        """Delete everything."""
        await self.transport.close()
        self._threads.close()

    async def _put(self, name: str, blob: Blob) -> None:
        self._unfinished.append(name)
        await self.transport.put(name, blob)

    async def _delete_unfinished(self) -> None:
        while self._unfinished:
            await self.transport.delete(self._unfinished[-1])
            self._unfinished.pop()

    async def _delta(self, entries: Sequence[TensorEntry], snapshot: Blob) -> tuple[DeltaEntry, Blob] | None:
        """Delta to the previous version; None if its layout differs or the delta is not smaller."""
        base = self.latest
        if base is None or _layout(base.tensors) != _layout(entries):
            return None
        try:
            before = await self.transport.get(snapshot_name(base.version))
        except WeightsError:
            return None
        if len(before) != base.nbytes:  # torn read; a wrong byte is found when the delta is applied
            return None
        blob, parts = await self._compute.run(lambda: encode_delta(entries, before, snapshot, self._threads))
        if len(blob) >= len(snapshot):
            return None
        entry = DeltaEntry(
            base=base.version, base_digest=base.digest, nbytes=len(blob), checksum=checksum(blob), parts=parts
        )
        return entry, blob

    async def _retire(self, snapshots: int) -> None:
        """Delete all but the newest `snapshots` snapshots, and deltas and manifests beyond `DELTAS_KEPT`."""
        for age, entry in enumerate(reversed(self._published)):
            if self._pins[entry.version]:
                continue
            if age >= snapshots and entry.whole:
                entry.whole = False
                await self.transport.delete(snapshot_name(entry.version))
            if age >= DELTAS_KEPT:
                self._published.remove(entry)
                await self.transport.delete(manifest_name(entry.version))
                await self.transport.delete(delta_name(entry.version))


def _layout(tensors: Sequence[TensorEntry]) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(entry.name, entry.dtype, entry.shape, entry.offset) for entry in tensors]
