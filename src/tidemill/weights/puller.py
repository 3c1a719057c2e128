"""The reader's side: from the version held to the version wanted, by the fewest bytes, and never by wrong ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tidemill.core.errors import WeightsError
from tidemill.core.protocols import Clock, Compute
from tidemill.core.records import PolicyVersion, Pulled, WeightManifest
from tidemill.weights.delta import apply_delta
from tidemill.weights.snapshot import Blob, Snapshot, Transport, aligned, allocate, verify
from tidemill.weights.store import delta_name, manifest_name, snapshot_name, unpack_manifest

ATTEMPTS = 5
DELTA_ATTEMPTS = 2
"""Of the attempts; the others take the full snapshot."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """What was pulled and is not in use yet."""

    pulled: Pulled
    snapshot: Snapshot
    own: bool  # the buffer is this puller's to write to, once it is out of use


class Puller:
    """Holds one version in use and prepares the next in a second buffer. `prepare` one at a time.

    `swap` may come from another thread than `prepare`: a buffer is written to only after it has gone out of use, and
    what was prepared but never swapped in is dropped, not used again.

    Args:
        compute: where deltas are applied and checksums compared; not the engine's.
        timeout_s: of one `prepare`.
        pinned: keeps a version from being deleted while it is pulled, where reader and store are in one process.
    """

    def __init__(
        self,
        transport: Transport,
        compute: Compute,
        *,
        clock: Clock,
        timeout_s: float = 300.0,
        retry_pause_s: float = 0.05,
        pinned: Callable[[PolicyVersion], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._transport, self._compute, self._clock, self._pinned = transport, compute, clock, pinned
        self._timeout_s, self._retry_pause_s = timeout_s, retry_pause_s
        self._held: _Ready | None = None
        self._ready: _Ready | None = None
        self._spare: Blob | None = None
        self._fetched = 0

    async def prepare(self, version: PolicyVersion) -> Pulled:
        """Have a version whole and verified in the second buffer.

        Raises:
            WeightsError: it cannot be had; what is held stays held.
        """
        began, self._fetched, self._ready = self._clock.now(), 0, None
        fault: WeightsError | None = None
        try:
            with self._pinned(version):
                async with asyncio.timeout(self._timeout_s):
                    for attempt in range(ATTEMPTS):
                        try:
                            snapshot, full, own = await self._attempt(version, by_delta=attempt < DELTA_ATTEMPTS)
                            break
                        except WeightsError as error:
                            fault = error
                            await asyncio.sleep(self._retry_pause_s * 2**attempt)
                    else:
                        raise WeightsError(f"version {version.number} did not come whole in {ATTEMPTS} pulls: {fault}")
        except TimeoutError:
            last = f"; the last fault: {fault}" if fault else ""
            raise WeightsError(f"version {version.number} did not come within {self._timeout_s:g} s{last}") from fault
        pulled = Pulled(
            manifest=snapshot.manifest,
            nbytes=self._fetched,
            full=full,
            pull_s=self._clock.now() - began,
            retries=attempt,
        )
        self._ready = _Ready(pulled, snapshot, own)
        return pulled

    def swap(self, pulled: Pulled, bind: Callable[[Snapshot], None]) -> None:
        """Let `bind` take the prepared version into use; the buffer in use before is then free to be written to.

        Raises:
            WeightsError: something else was prepared since.
        """
        ready, before = self._ready, self._held
        if ready is None or ready.pulled is not pulled:
            raise WeightsError(f"version {pulled.manifest.version.number} is not the one that was prepared last")
        bind(ready.snapshot)
        self._held = ready
        if before is not None and before.own and before.snapshot.buffer is not ready.snapshot.buffer:
            self._spare = before.snapshot.buffer

    def close(self) -> None:
        """Let go of every buffer."""
        self._held = self._ready = self._spare = None

    async def _attempt(self, version: PolicyVersion, *, by_delta: bool) -> tuple[Snapshot, bool, bool]:
        """The version, whether it came in full, and whether its buffer is ours."""
        held = self._held
        blob = await self._get(manifest_name(version))
        manifest = unpack_manifest(blob, of=f"version {version.number}")
        if held is not None and held.snapshot.manifest.digest == manifest.digest:
            return Snapshot(manifest=manifest, buffer=held.snapshot.buffer), False, held.own
        if held is not None and by_delta and (chain := await self._chain(held.snapshot.manifest, manifest)):
            return await self._by_deltas(held.snapshot, chain), False, True
        fetched = await self._get(snapshot_name(version))

        def checked() -> Blob:
            verify(manifest, fetched)
            return aligned(fetched)

        return Snapshot(manifest=manifest, buffer=await self._compute.run(checked)), True, False

    async def _chain(self, held: WeightManifest, wanted: WeightManifest) -> list[WeightManifest]:
        """The versions to go through, `wanted` last; empty where the full snapshot is fewer bytes or the only way."""
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

    async def _by_deltas(self, held: Snapshot, chain: list[WeightManifest]) -> Snapshot:
        wanted = chain[-1]
        deltas = [await self._get(delta_name(manifest.version)) for manifest in chain]
        spare, self._spare = self._spare, None

        def applied() -> Blob:
            out = spare if spare is not None and len(spare) == wanted.nbytes else allocate(wanted.nbytes)
            old = held.buffer
            for manifest, delta in zip(chain, deltas, strict=True):
                assert manifest.delta is not None
                apply_delta(wanted.tensors, delta, manifest.delta, old, out)
                old = out
            verify(wanted, out)
            return out

        return Snapshot(manifest=wanted, buffer=await self._compute.run(applied))

    async def _get(self, name: str) -> Blob:
        blob = await self._transport.get(name)
        self._fetched += len(blob)
        return blob
