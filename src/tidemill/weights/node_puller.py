"""Pulls a version once for all workers of a machine, which share its snapshot in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidemill.core.protocols import Clock, Compute
from tidemill.core.records import PolicyVersion, Pulled, WeightManifest
from tidemill.weights.node_folder import NodeFolder, SharedFile
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Blob, Snapshot, Transport, verify
from tidemill.weights.store import manifest_name, snapshot_name, unpack_manifest


class NodePuller(Puller):
    """As `Puller`, with buffers that are files of the node's folder. Peak: two snapshots on the machine."""

    def __init__(
        self, transport: Transport, compute: Compute, *, clock: Clock, folder: NodeFolder, **settings: Any
    ) -> None:
        super().__init__(transport, compute, clock=clock, **settings)
        self._folder = folder
        self._files: dict[str, SharedFile] = {}  # by digest; those in use, and the prepared one

    def swap(self, pulled: Pulled, bind: Callable[[Snapshot], None]) -> None:
        super().swap(pulled, bind)
        self._spare = None
        for digest in self._files.keys() - {pulled.manifest.digest}:
            self._files.pop(digest).close()
        self._folder.remove_unused(keep=pulled.manifest.digest)

    def close(self) -> None:
        """Release every buffer; the last process of the machine deletes the folder."""
        super().close()
        while self._files:
            self._files.popitem()[1].close()
        self._folder.close()

    async def _attempt(self, version: PolicyVersion, *, by_delta: bool) -> tuple[Snapshot, bool, bool]:
        held = self._held
        manifest = unpack_manifest(await self._get(manifest_name(version)), of=f"version {version.number}")
        if held is not None and held.snapshot.manifest.digest == manifest.digest:
            return Snapshot(manifest=manifest, buffer=held.snapshot.buffer), False, False
        async with self._folder.writing():
            if (found := self._folder.find(manifest.digest, manifest.nbytes)) is not None:
                self._keep(manifest.digest, found)
                return Snapshot(manifest=manifest, buffer=found.buffer), False, False
            return await self._written(manifest, held.snapshot if held else None, by_delta=by_delta)

    async def _written(
        self, manifest: WeightManifest, held: Snapshot | None, *, by_delta: bool
    ) -> tuple[Snapshot, bool, bool]:
        """Pull the version into a new file, and make it visible when it is verified."""
        chain = await self._chain(held.manifest, manifest) if held is not None and by_delta else []
        self._folder.remove_unused()
        file, partial = self._folder.create(manifest.nbytes)
        try:
            if held is not None and chain:
                await self._by_deltas(held, chain, file.buffer)
            else:
                fetched = await self._get(snapshot_name(manifest.version))

                def copied() -> Blob:
                    verify(manifest, fetched)
                    file.buffer[:] = fetched
                    return file.buffer

                await self._compute.run(copied)
            self._folder.complete(partial, manifest.digest)
        except BaseException:
            file.close()
            partial.unlink(missing_ok=True)
            raise
        self._keep(manifest.digest, file)
        file.buffer.flags.writeable = False
        return Snapshot(manifest=manifest, buffer=file.buffer), not chain, False

    def _keep(self, digest: str, file: SharedFile) -> None:
        if (before := self._files.pop(digest, None)) is not None:
            before.close()
        self._files[digest] = file
