"""The manifest of a whole checkpoint, and the lock with which a reader keeps it from deletion.

The operating system releases the lock when the reader ends, however it ends. On a file system without locks nothing is
pinned.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from tidemill.core.errors import UserError
from tidemill.core.records import Record, decode_json

MANIFEST = "checkpoint.json"
FORMAT = 1
_CHUNK_BYTES = 4 << 20


class FileRecord(Record):
    """One file, as it was when it was written."""

    bytes: int
    xxh3_128: str


class Manifest(Record):
    """The files of one checkpoint and how good it is."""

    step: int
    score: float | None  # higher is better; None when not measured at this step
    files: dict[str, FileRecord]  # by path relative to the checkpoint
    format: int = FORMAT
    xxh3_128: str = ""  # of this record without it; version 0.1 wrote none

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def checksum(self) -> str:
        """What `xxh3_128` should be."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(self, xxh3_128="")))


def seal(folder: Path, *, step: int, score: float | None) -> Manifest:
    """Flush every file under `folder` to the disk and write the manifest that names them all.

    Raises:
        OSError: the disk is full, or a file cannot be read back.
    """
    target = folder / MANIFEST
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != target)
    files = {path.relative_to(folder).as_posix(): record_file(path) for path in paths}
    if score is not None and not math.isfinite(score):
        score = None
    manifest = Manifest(step=step, score=score, files=files)
    manifest = msgspec.structs.replace(manifest, xxh3_128=manifest.checksum)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    record_file(target)
    for directory in sorted({path.parent for path in (*paths, target)}, reverse=True):
        make_durable(directory)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        OSError: missing or unreadable.
        msgspec.DecodeError: damaged, or not a manifest.
    """
    manifest = decode_json((folder / MANIFEST).read_bytes(), Manifest)
    if manifest.format == FORMAT and manifest.xxh3_128 not in ("", manifest.checksum):
        raise msgspec.DecodeError("it does not match its checksum")
    return manifest


def damage(folder: Path, *, model_only: bool = False) -> str:
    """Why the checkpoint cannot be used; empty when every file is as it was written. Reads every byte.

    Args:
        model_only: of what a model is loaded from; what a trainer goes on from lies in folders below.
    """
    try:
        manifest = read_manifest(folder)
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    except msgspec.DecodeError as error:
        return f"{MANIFEST} is damaged: {error}"
    if manifest.format != FORMAT:
        return f"format {manifest.format} is not known to this version, which writes {FORMAT}"
    for name, expected in manifest.files.items():
        if model_only and "/" in name:
            continue
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                return f"{name} has {size:,} bytes instead of {expected.bytes:,}"
            if record_file(path, sync=False) != expected:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def refuse_damaged(folder: Path) -> None:
    """For whatever loads a model: of a folder that is no checkpoint nothing is known.

    Raises:
        UserError: the files of a checkpoint are not as they were written.
    """
    if (folder / MANIFEST).is_file() and (reason := damage(folder, model_only=True)):
        raise UserError(
            f"the checkpoint is damaged: {reason}",
            where=str(folder),
            hint="choose another checkpoint, or bring this one back; a pipeline makes the result of a stage again "
            f"once this folder is deleted; without {MANIFEST} it is taken as it is",
        )


def make_durable(path: Path) -> None:
    """A file, or the entries of a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def record_file(path: Path, *, sync: bool = True) -> FileRecord:
    """Size and checksum of a file, made durable on the way."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    size = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return FileRecord(bytes=size, xxh3_128=digest.hexdigest())


@contextmanager
def pinned(folder: Path) -> Iterator[bool]:
    """Keep a checkpoint until the block ends; False if it is gone. A folder without a manifest is not deleted by
    retention, and needs no pin."""
    manifest = folder / MANIFEST
    try:
        file = manifest.open("rb")
    except OSError:
        yield folder.is_dir()
        return
    with file:
        yield _lock(file.fileno(), fcntl.LOCK_SH) and _is_at(manifest, file.fileno())


@contextmanager
def unpinned(folder: Path) -> Iterator[bool]:
    """Whether nobody has pinned a checkpoint; nobody can until the block ends."""
    try:
        file = (folder / MANIFEST).open("r+b")  # network file systems lock for one alone only what may be written
    except OSError:
        yield True
        return
    with file:
        yield _lock(file.fileno(), fcntl.LOCK_EX)


def _is_at(path: Path, file: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _lock(file: int, kind: int) -> bool:
    """False if another process holds a lock that excludes this one."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True
