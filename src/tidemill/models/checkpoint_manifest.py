"""The manifest of a complete checkpoint, and the lock by which a reader protects it from deletion.

The operating system releases the lock when the reader's process ends. On a file system without locks nothing is pinned.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import xxhash

from tidemill.core.errors import UserError
from tidemill.core.records import Record, decode_json

MANIFEST = "checkpoint.json"
FORMAT = 1
_CHUNK_BYTES = 4 << 20


class FileRecord(Record):
    """Size and checksum of a file when it was written."""

    bytes: int
    xxh3_128: str


class Manifest(Record):
    """The files of one checkpoint and its score."""

    step: int
    score: float | None  # higher is better; None if not measured at this step
    files: dict[str, FileRecord]  # by path relative to the checkpoint
    format: int = FORMAT
    xxh3_128: str = ""  # of this record without it

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def checksum(self) -> str:
        """The expected value of `xxh3_128`."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(self, xxh3_128="")))


def seal(folder: Path, *, step: int, score: float | None) -> Manifest:
    """Flush every file under `folder` to the disk, then write the manifest.

    Raises:
        OSError: the disk is full, or a file cannot be read back.
    """
    target = folder / MANIFEST
    files = record_files(folder)
    files.pop(MANIFEST, None)
    if score is not None and not math.isfinite(score):
        score = None
    manifest = Manifest(step=step, score=score, files=files)
    manifest = msgspec.structs.replace(manifest, xxh3_128=manifest.checksum)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    make_durable(target)
    for directory in sorted({(folder / name).parent for name in (*files, MANIFEST)}, reverse=True):
        make_durable(directory)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        OSError: missing or unreadable.
        msgspec.DecodeError: damaged, or not a manifest.
    """
    manifest = decode_json((folder / MANIFEST).read_bytes(), Manifest)
    if manifest.format == FORMAT and manifest.xxh3_128 != manifest.checksum:
        raise msgspec.DecodeError("it does not match its checksum")
    return manifest


def damage(folder: Path, *, model_only: bool = False) -> str:
    """Why the checkpoint cannot be used; empty if every file matches the manifest. Reads every byte.

    Args:
        model_only: check the model's files only, not the trainer's state, which is in subfolders.
    """
    try:
        manifest = read_manifest(folder)
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    except msgspec.DecodeError as error:
        return f"{MANIFEST} is damaged: {error}"
    if manifest.format != FORMAT:
        return f"format {manifest.format} is not known to this version, which writes {FORMAT}"
    files = {name: file for name, file in manifest.files.items() if not (model_only and "/" in name)}
    return first_difference(folder, files)


def refuse_damaged(folder: Path) -> None:
    """Raises UserError: a model file of a checkpoint differs from its manifest. A folder without a manifest passes."""
    if (folder / MANIFEST).is_file() and (reason := damage(folder, model_only=True)):
        raise UserError(
            f"the checkpoint is damaged: {reason}",
            where=str(folder),
            hint="choose another checkpoint or restore this one; a pipeline repeats a stage whose result is deleted",
        )


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Size and checksum of every file under `folder`, by relative path; each file is flushed to the disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _record_file(path, sync=True) for path in paths}


def first_difference(folder: Path, files: Mapping[str, FileRecord]) -> str:
    """Names the first file that is missing or differs from its record; empty if there is none. Reads every byte."""
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                return f"{name} has {size:,} bytes instead of {expected.bytes:,}"
            if _record_file(path, sync=False) != expected:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def make_durable(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _record_file(path: Path, *, sync: bool) -> FileRecord:
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
    """Protect a checkpoint from deletion until the block ends; False if it is gone.

    Retention deletes only folders with a manifest; others need no pin.
    """
    manifest = folder / MANIFEST
    file = None
    with suppress(OSError):  # a `yield` in a handler would chain this error to every error of the block
        file = manifest.open("rb")
    if file is None:
        yield folder.is_dir()
        return
    with file:
        locked = _lock(file.fileno(), fcntl.LOCK_SH)
        try:  # the checkpoint may have been replaced between opening and locking
            same = os.path.samestat(manifest.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            same = False
        yield locked and same


@contextmanager
def unpinned(folder: Path) -> Iterator[bool]:
    """Whether no reader has pinned a checkpoint; none can until the block ends."""
    file = None
    with suppress(OSError):
        file = (folder / MANIFEST).open("r+b")  # on network file systems an exclusive lock needs a writable file
    if file is None:
        yield True
        return
    with file:
        yield _lock(file.fileno(), fcntl.LOCK_EX)


def _lock(file: int, kind: int) -> bool:
    """False if another process holds a conflicting lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True
