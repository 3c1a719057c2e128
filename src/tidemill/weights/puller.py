"""Pulls a version by the fewest bytes (deltas or a snapshot) and verifies it.

Of a sharded trainer the snapshots of all ranks, which hold consecutive rows of every tensor, are used together.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from tidemill.core.errors import WeightsError
from tidemill.core.protocols import Clock, Compute
from tidemill.core.records import PolicyVersion, Pulled, TensorEntry, WeightManifest
from tidemill.weights.delta import INLINE, Threads, apply_delta
from tidemill.weights.snapshot import ALIGNMENT, Blob, BlobSource, Snapshot, aligned, allocate, verify
from tidemill.weights.store import delta_name, manifest_name, snapshot_name, unpack_manifest

ATTEMPTS = 5
DELTA_ATTEMPTS = 2
"""Attempts that may use deltas; later ones pull the full snapshot."""

Bind: TypeAlias = Callable[[Sequence[Snapshot]], None]
"""Takes a version: one snapshot, or one for each rank of a sharded trainer, in their order."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A pulled and verified version."""

    pulled: Pulled
    snapshot: Snapshot
    own: bool  # the puller may overwrite the buffer once it is out of use


class Puller:
    """Holds the version in use and prepares the next in a second buffer; one `prepare` at a time.

    `swap` may run on another thread than `prepare`: a buffer is overwritten only when out of use, and a prepared
    version that was never swapped in is dropped.

    Args:
        compute: applies deltas and compares checksums; not the engine's thread.
        threads: share the work on a delta.
        timeout_s: deadline of one `prepare`.
        pinned: keeps a version from deletion while it is pulled, if reader and store share a process.
    """

    def __init__(
        self,
        source: BlobSource,
        compute: Compute,
        *,
        clock: Clock,
        threads: Threads = INLINE,
        timeout_s: float = 300.0,
        retry_pause_s: float = 0.05,
        pinned: Callable[[PolicyVersion], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._source, self._compute, self._clock, self._pinned = source, compute, clock, pinned
        self._threads = threads
        self._timeout_s, self._retry_pause_s = timeout_s, retry_pause_s
        self._held: Prepared | None = None
        self._ready: Prepared | None = None
        self._spare: Blob | None = None
        self._fetched = 0

    async def prepare(self, version: PolicyVersion) -> Pulled:
        """Pull and verify a version into the second buffer.

        Raises:
            WeightsError: all attempts failed; the version in use is unchanged.
        """
        started_s, self._fetched, self._ready = self._clock.now(), 0, None
        failure: WeightsError | None = None
        try:
            with self._pinned(version):
                async with asyncio.timeout(self._timeout_s):
                    for attempt in range(ATTEMPTS):
                        try:
                            snapshot, full, own = await self._attempt(version, by_delta=attempt < DELTA_ATTEMPTS)
                            break
                        except WeightsError as error:
                            failure = error
                            await asyncio.sleep(self._retry_pause_s * 2**attempt)
                    else:
                        raise WeightsError(f"version {version.number}: {ATTEMPTS} pulls failed: {failure}")
        except TimeoutError:
            last = f"; last failure: {failure}" if failure else ""
            raise WeightsError(f"version {version.number}: pull exceeded {self._timeout_s:g} s{last}") from failure
        pulled = Pulled(
            manifest=snapshot.manifest,
            nbytes=self._fetched,
            full=full,
            pull_s=self._clock.now() - started_s,
            retries=attempt,
        )
        self._ready = Prepared(pulled, snapshot, own)
        return pulled

    def swap(self, pulled: Pulled, bind: Bind) -> None:
        """Call `bind` with the prepared version; the buffer of the previous one is then free.

        Raises:
            WeightsError: another version was prepared since.
        """
        prepared = self.prepared(pulled)
        bind([prepared.snapshot])
        self.use(prepared)

    def prepared(self, pulled: Pulled) -> Prepared:
        """Raises WeightsError: another version was prepared since."""
        ready = self._ready
        if ready is None or ready.pulled is not pulled:
            raise WeightsError(f"version {pulled.manifest.version.number} is not the last prepared version")
        return ready

    def use(self, prepared: Prepared) -> None:
        """It is bound; the buffer of the previous version is free."""
        before, self._held = self._held, prepared
        if before is not None and before.own and before.snapshot.buffer is not prepared.snapshot.buffer:
            self._spare = before.snapshot.buffer

    def close(self) -> None:
        """Release every buffer."""
        self._held = self._ready = self._spare = None
        self._threads.close()

    async def _attempt(self, version: PolicyVersion, *, by_delta: bool) -> tuple[Snapshot, bool, bool]:
        """Return the version, whether a full snapshot was pulled, and whether this puller owns the buffer."""
        held = self._held
        blob = await self._get(manifest_name(version))
        manifest = unpack_manifest(blob, of=f"version {version.number}")
        if held is not None and held.snapshot.manifest.digest == manifest.digest:
            return replace(held.snapshot, manifest=manifest), False, held.own
        return await self._fetch(manifest, held.snapshot if held else None, by_delta=by_delta)

    async def _fetch(
        self, manifest: WeightManifest, held: Snapshot | None, *, by_delta: bool
    ) -> tuple[Snapshot, bool, bool]:
        """As `_attempt`, for a version that is not held."""
        if held is not None and by_delta and (chain := await self._chain(held.manifest, manifest)):
            spare, self._spare = self._spare, None
            out = spare if spare is not None and len(spare) == manifest.nbytes else allocate(manifest.nbytes)
            return await self._by_deltas(held, chain, out), False, True
        fetched = await self._get(snapshot_name(manifest.version))

        def checked() -> Blob:
            verify(manifest, fetched)
            return aligned(fetched)

        return Snapshot(manifest=manifest, buffer=await self._compute.run(checked)), True, False

    async def _chain(self, held: WeightManifest, wanted: WeightManifest) -> list[WeightManifest]:
        """Return the manifests from the held version to `wanted`; empty if the full snapshot is smaller or required."""
        chain, nbytes, at = [wanted], 0, wanted
        while True:
            if at.delta is None or (nbytes := nbytes + at.delta.nbytes) >= wanted.nbytes:
                return []
            if at.delta.base_digest == held.digest:
                return chain
            try:
                blob = await self._get(manifest_name(at.delta.base))
            except WeightsError:
                return []
            at = unpack_manifest(blob, of=f"version {at.delta.base.number}")
            chain.insert(0, at)

    async def _by_deltas(self, held: Snapshot, chain: list[WeightManifest], out: Blob) -> Snapshot:
        """Write the last version of the chain to `out`."""
        wanted = chain[-1]
        deltas = [await self._get(delta_name(manifest.version)) for manifest in chain]

        def applied() -> Blob:
            old = held.buffer
            for manifest, delta in zip(chain, deltas, strict=True):
                assert manifest.delta is not None
                apply_delta(wanted.tensors, delta, manifest.delta, old, out, self._threads)
                old = out
            verify(wanted, out)
            return out

        return Snapshot(manifest=wanted, buffer=await self._compute.run(applied))

    async def _get(self, name: str) -> Blob:
        blob = await self._source.get(name)
        self._fetched += len(blob)
        return blob


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
    return msgspec.structs.replace(first, nbytes=total, tensors=tuple(tensors), delta=None, part_sums=())


class PullerGroup:
    """Pulls a version from every rank at the same time; has the interface of `Puller`.

    Args:
        pullers: one for each rank, in their order.
    """

    def __init__(self, pullers: Sequence[Puller]) -> None:
        self._pullers = pullers
        self._ready: tuple[Pulled, Sequence[Pulled]] | None = None

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

    def swap(self, pulled: Pulled, bind: Bind) -> None:
        """See `Puller.swap`. The ranks change their versions together, or none does."""
        if self._ready is None or self._ready[0] is not pulled:
            raise WeightsError(f"version {pulled.manifest.version.number} is not the last prepared version")
        parts = [puller.prepared(part) for puller, part in zip(self._pullers, self._ready[1], strict=True)]
        bind([part.snapshot for part in parts])
        for puller, part in zip(self._pullers, parts, strict=True):
            puller.use(part)

    def close(self) -> None:
        """Release every buffer."""
        self._ready = None
        for puller in self._pullers:
            puller.close()
