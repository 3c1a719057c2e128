"""The cache of built models: each folder is built once and completely, also under concurrent processes.

A folder gets its final name when all its files are on disk, with a manifest of sizes and checksums. A killed build
leaves a folder under a temporary name, which the next build removes.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from tidemill.core.errors import DeadlineError, UserError
from tidemill.core.records import Record, decode_json
from tidemill.models.checkpoint_manifest import FileRecord, first_difference, make_durable, record_files

Progress = Callable[[str], None]

MANIFEST = "tidemill-manifest.json"
LOCK_DEADLINE_S = 900.0
_POLL_S = 0.05
_REPORT_EVERY_S = 10.0
_OTHER_CACHE = "or set TIDEMILL_CACHE to another folder"


class CacheManifest(Record):
    """The files of a built folder."""

    files: dict[str, FileRecord]  # by path relative to the folder


def is_built(folder: Path) -> bool:
    """Whether the folder has been completed; `damage` also checks its files."""
    return (folder / MANIFEST).is_file()


def damage(folder: Path) -> str:
    """Why a built folder cannot be used; empty if every file matches the manifest. Reads every byte."""
    try:
        manifest = decode_json((folder / MANIFEST).read_bytes(), CacheManifest)
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    except msgspec.DecodeError as error:
        return f"{MANIFEST} is damaged: {error}"
    return first_difference(folder, manifest.files)


def build_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    progress: Progress,
    needs_bytes: int = 0,
    lock_deadline_s: float = LOCK_DEADLINE_S,
) -> Path:
    """Return `folder`, calling `build(empty_folder)` first if it is absent or damaged.

    Args:
        folder: the final path, in the cache.
        build: fills an empty folder; if it raises, the folder is removed.
        progress: called with one line when the build waits or repairs.
        needs_bytes: free disk space required to build.
        lock_deadline_s: how long to wait for another process that builds the same folder.

    Raises:
        UserError: the cache is not writable or the disk is full.
        DeadlineError: another process held the lock for too long.
    """
    if is_built(folder) and not damage(folder):
        return folder
    with _disk_errors(folder.parent):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # on file systems without new folders, such as /proc
            raise NotADirectoryError(errno.ENOTDIR, error.strerror, str(folder.parent)) from error
        with _locked(folder, progress, lock_deadline_s):
            _remove_partial_builds(folder)
            if folder.exists():
                if not (reason := damage(folder)):
                    return folder  # built by another process in the meantime
                progress(f"{folder}: the cached copy is damaged ({reason}); building it again")
            free = shutil.disk_usage(folder.parent).free
            if free < needs_bytes:
                raise UserError(
                    f"{needs_bytes / 1e9:.1f} GB are needed but only {free / 1e9:.1f} GB are free",
                    where=str(folder.parent),
                    hint=f"free some space, {_OTHER_CACHE}",
                )
            _build(folder, build)
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=_temporary_prefix(folder), dir=folder.parent))
    try:
        build(partial)
        partial.chmod(0o755)  # mkdtemp makes it private
        manifest = partial / MANIFEST
        files = record_files(partial)
        manifest.write_bytes(msgspec.json.format(msgspec.json.encode(CacheManifest(files=files))))
        for path in (manifest, *(path for path in partial.rglob("*") if path.is_dir()), partial):
            make_durable(path)
        if folder.exists():  # damaged: a folder with files cannot be replaced by a rename
            folder.rename(partial.with_name(partial.name + "-old"))
        partial.rename(folder)
        make_durable(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _remove_partial_builds(folder)


def _remove_partial_builds(folder: Path) -> None:
    """Remove the folders of killed builds; the caller holds the lock."""
    for leftover in folder.parent.glob(_temporary_prefix(folder) + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _temporary_prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


@contextmanager
def _locked(folder: Path, progress: Progress, deadline_s: float) -> Iterator[None]:
    """Hold the folder's lock, which the operating system releases when its holder ends."""
    lock_path = folder.parent / f".{folder.name}.lock"
    owner_path = folder.parent / f".{folder.name}.owner"
    lock = FileLock(lock_path, is_singleton=False)
    started = time.monotonic()
    next_report_s = 0.5
    while True:
        try:
            lock.acquire(timeout=min(next_report_s, deadline_s), poll_interval=_POLL_S)
            break
        except Timeout:
            waited_s = time.monotonic() - started
            try:
                owner = owner_path.read_text(encoding="utf-8") or "another process"
            except OSError:
                owner = "another process"
            if waited_s >= deadline_s:
                raise DeadlineError(
                    f"{owner} to finish building {folder.name}", waited_s=waited_s, look_at=str(lock_path)
                ) from None
            progress(f"waiting for {owner} to finish building {folder.name} ({waited_s:.0f} s; lock {lock_path})")
            next_report_s = min(_REPORT_EVERY_S, deadline_s - waited_s)
    try:
        owner_path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        owner_path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def _disk_errors(parent: Path) -> Iterator[None]:
    """Raise a full or read-only disk as a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, hint = "the disk is full", f"free some space, {_OTHER_CACHE}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            what, hint = f"the cache cannot be written ({error.strerror})", f"make it writable, {_OTHER_CACHE}"
        else:
            raise
        raise UserError(what, where=str(parent), hint=hint) from error
