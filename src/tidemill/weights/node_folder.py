"""Snapshots in the shared memory of a machine, each one pulled once for all processes of a run. A sharded trainer has
one for each rank's rows.

A file is renamed to its final name when it is complete and verified; from then on it is only read. Whoever uses one
holds a shared lock on it, which the kernel releases when the process ends, so that files nobody uses can be deleted.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from tidemill.core.errors import WeightsError
from tidemill.core.protocols import Clock, Compute
from tidemill.core.records import Pulled, WeightManifest
from tidemill.weights.puller import Prepared, Puller
from tidemill.weights.snapshot import Blob, BlobSource, Snapshot, verify
from tidemill.weights.store import snapshot_name

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "tidemill-weights"
PARTIAL = ".partial"
POLL_S, FORGET_S = 0.01, 5.0


class SharedFile:
    """A file in the folder, locked and mapped by this process."""

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        self._descriptor = descriptor
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, nbytes, access=access)
        self.buffer: Blob = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Release the lock. The memory stays valid for who still refers to it."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping has a copy of the descriptor
            os.close(self._descriptor)
            self._descriptor = -1


class NodeFolder:
    """The folder of a run; made on first use, and deleted by the last process that closes it.

    Args:
        run: names the run; processes with the same name share the folder.
        rank: of the trainer, whose rows are written through this object; those of others may be at the same time.
    """

    def __init__(self, run: str, *, rank: int = 0, parent: Path = SHARED_MEMORY) -> None:
        self.path = _folder_of(run, parent)
        self._lock = _lock_of(Path(f"{self.path}.{rank}.lock"))
        remove_abandoned(parent)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Only one process writes a rank's snapshot at a time; the caller sets a deadline."""
        while True:
            try:
                self._lock.acquire(timeout=0)
                break
            except Timeout:
                await asyncio.sleep(POLL_S)
        try:
            yield
        finally:
            self._lock.release()

    def find(self, digest: str, nbytes: int) -> SharedFile | None:
        """A complete snapshot."""
        path = self.path / digest
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:  # else it was deleted between the two calls
                return SharedFile(descriptor, nbytes, writable=False)
            os.close(descriptor)

    def create(self, nbytes: int) -> tuple[SharedFile, Path]:
        """An incomplete snapshot to write to. Raises WeightsError: the memory is full."""
        path = self.path / f"{secrets.token_hex(8)}{PARTIAL}"
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # the folder was deleted between the two calls
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if os.fstat(descriptor).st_nlink:  # else the file was
                    break
                os.close(descriptor)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # else a full memory would be a SIGBUS on writing
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            raise WeightsError(f"{self.path.parent} has no room for {nbytes:,} bytes: {error.strerror}") from error
        return SharedFile(descriptor, nbytes, writable=True), path

    def complete(self, partial: Path, digest: str) -> None:
        """Make a written and verified snapshot visible."""
        partial.chmod(0o400)
        partial.rename(self.path / digest)

    def remove_unused(self) -> None:
        """Delete the files that nobody uses."""
        with suppress(FileNotFoundError):  # there is no folder
            for path in self.path.iterdir():
                _remove_if_unused(path)

    def close(self) -> None:
        """Delete the folder if nobody uses it."""
        _remove_unused_folder(self.path)


class NodePuller(Puller):
    """As `Puller`, with buffers that are files of the node's folder. Peak: two snapshots on the machine.

    Args:
        folder: that of a run, and of one rank of a sharded trainer.
    """

    def __init__(
        self, source: BlobSource, compute: Compute, *, clock: Clock, folder: NodeFolder, **settings: Any
    ) -> None:
        super().__init__(source, compute, clock=clock, **settings)
        self._folder = folder
        self._files: dict[str, SharedFile] = {}  # by digest
        self._wanted = self._bound = ""  # digests: the one that is pulled or prepared, and the one last bound

    def prepared(self, pulled: Pulled) -> Prepared:
        prepared = super().prepared(pulled)
        self._bound = prepared.snapshot.manifest.digest
        return prepared

    def use(self, prepared: Prepared) -> None:
        super().use(prepared)
        self._spare = None
        self._release_unused()
        self._folder.remove_unused()

    def close(self) -> None:
        """Release every buffer; the last process of the machine deletes the folder."""
        super().close()
        while self._files:
            self._files.popitem()[1].close()
        self._folder.close()

    async def _fetch(
        self, manifest: WeightManifest, held: Snapshot | None, *, by_delta: bool
    ) -> tuple[Snapshot, bool, bool]:
        self._wanted = manifest.digest
        self._release_unused()
        async with self._folder.writing():
            if (found := self._folder.find(manifest.digest, manifest.nbytes)) is not None:
                self._keep(manifest.digest, found)
                return self._snapshot(manifest, found), False, False
            return await self._written(manifest, held, by_delta=by_delta)

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
        return self._snapshot(manifest, file), not chain, False

    def _snapshot(self, manifest: WeightManifest, file: SharedFile) -> Snapshot:
        return Snapshot(manifest=manifest, buffer=file.buffer, file=self._folder.path / manifest.digest)

    def _release_unused(self) -> None:
        """Release versions that were prepared and never used, and those before the one in use."""
        held = self._held.snapshot.manifest.digest if self._held is not None else ""
        for digest in [*self._files]:
            if digest not in (held, self._bound, self._wanted):
                self._files.pop(digest).close()

    def _keep(self, digest: str, file: SharedFile) -> None:
        if (before := self._files.pop(digest, None)) is not None:
            before.close()
        self._files[digest] = file


def remove_abandoned(parent: Path = SHARED_MEMORY) -> None:
    """Delete files of this user's earlier runs, whose processes have ended."""
    for folder in parent.glob(f"{PREFIX}-{os.getuid()}-*/"):
        _remove_unused_folder(folder)


async def forget_snapshots(run: str, *, parent: Path = SHARED_MEMORY) -> None:
    """Delete the folder of a run whose processes on this machine have been killed. Waits until they have ended."""
    folder = _folder_of(run, parent)
    with suppress(TimeoutError):  # somebody still uses it: the next run deletes it
        async with asyncio.timeout(FORGET_S):
            while folder.is_dir():
                _remove_unused_folder(folder)
                await asyncio.sleep(POLL_S)


def _folder_of(run: str, parent: Path) -> Path:
    return parent / f"{PREFIX}-{os.getuid()}-{run}"


def _lock_of(path: Path) -> FileLock:
    return FileLock(path, thread_local=False)


def _remove_unused_folder(folder: Path) -> None:
    """Delete what nobody uses, unless somebody writes to the folder."""
    if not folder.is_dir():
        return
    locks = [*folder.parent.glob(f"{folder.name}.*.lock")]
    with suppress(Timeout, OSError), ExitStack() as stack:  # it is in use, or has been deleted
        for lock in locks:
            stack.enter_context(_lock_of(lock).acquire(timeout=0))
        for path in folder.iterdir():
            _remove_if_unused(path)
        folder.rmdir()
        for lock in locks:
            lock.unlink(missing_ok=True)


def _remove_if_unused(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        pass  # somebody uses it
    finally:
        os.close(descriptor)
