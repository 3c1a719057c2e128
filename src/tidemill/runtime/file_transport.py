"""Published weights on one host: files in shared memory where there is room, on disk otherwise, mapped by readers."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from tidemill.core.errors import UserError, WeightsError
from tidemill.weights.transport import Blob, Missing

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "tidemill-weights-"
LOCK = ".lock"


class FileTransport:
    """Implements `weights.transport.Transport` over a folder.

    `create` makes the owner's side; any process of the host reads with `FileTransport(folder)`. The owner holds a lock
    beside the folder for as long as it lives, which the system takes from it however it ends: a folder whose lock is
    free belongs to nobody and is deleted by the next owner.
    """

    zero_copy = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: FileLock | None = None

    @classmethod
    def create(cls, root: Path | None = None, *, room_bytes: int = 0) -> FileTransport:
        """A new folder under `root`: by default shared memory when `room_bytes` are free there, else the temporary
        directory.

        Raises:
            UserError: nothing can be written there.
        """
        root = root or _roomy(room_bytes)
        transport = cls(root / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            delete_abandoned(root)
            transport._lock = _lock_of(transport.folder)
            transport._lock.acquire()
            transport.folder.mkdir()
        except OSError as error:
            raise _unwritable(error, root) from error
        return transport

    async def put(self, name: str, blob: Blob) -> None:
        """
        Raises:
            UserError: there is no room.
        """
        try:
            await asyncio.to_thread(_write, self.folder / name, blob)
        except OSError as error:
            raise _unwritable(error, self.folder) from error

    async def get(self, name: str) -> Blob:
        return await asyncio.to_thread(_mapped, self.folder / name)

    async def delete(self, name: str) -> None:
        await asyncio.to_thread((self.folder / name).unlink, missing_ok=True)

    async def close(self) -> None:
        """Of the owner: delete the folder. Readers keep what they mapped."""
        if self._lock is not None:
            await asyncio.to_thread(_remove, self.folder, self._lock)
            self._lock = None


def delete_abandoned(root: Path) -> None:
    """Delete the folders of owners that are gone."""
    for path in root.glob(f"{PREFIX}*{LOCK}"):
        lock = FileLock(path, blocking=False, is_singleton=False)
        try:
            lock.acquire()
        except (Timeout, OSError):  # its owner lives, or is another user
            continue
        _remove(path.with_suffix(""), lock)


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder.with_name(folder.name + LOCK), blocking=False, thread_local=False, is_singleton=False)


def _remove(folder: Path, lock: FileLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def _roomy(room_bytes: int) -> Path:
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= room_bytes:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _write(path: Path, blob: Blob) -> None:
    unfinished = path.with_name(f".{path.name}")
    try:
        with unfinished.open("wb", buffering=0) as stream:
            rest = blob.data
            while rest:
                rest = rest[stream.write(rest) :]
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _mapped(path: Path) -> Blob:
    try:
        with path.open("rb") as stream:
            if not os.fstat(stream.fileno()).st_size:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError as error:
        raise Missing(f"there is no {path.name} in {path.parent}") from error
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error}") from error


def _unwritable(error: OSError, folder: Path) -> UserError:
    return UserError(
        f"weights cannot be published there: {error.strerror or error}",
        where=str(folder),
        cure="make room (two snapshots of the model are kept), or name another folder",
    )
