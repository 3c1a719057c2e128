"""The cache of built models: each folder is built once, completely or not at all, whoever asks at the same time.

A folder appears under its final name only when every file is on the disk, with a manifest of sizes and checksums. A
build that was killed leaves a folder under a temporary name, which the next caller removes.
"""

from __future__ import annotations

import errno
import json
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
from tidemill.models.checkpoint_manifest import make_durable, record_file

Progress = Callable[[str], None]

MANIFEST = "tidemill-manifest.json"
LOCK_DEADLINE_S = 900.0
_POLL_S = 0.05
_REPORT_EVERY_S = 10.0


def cache_dir() -> Path:
    """`TIDEMILL_CACHE`, else `$XDG_CACHE_HOME/tidemill`, else `~/.cache/tidemill`. Not created here."""
    if chosen := os.environ.get("TIDEMILL_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "tidemill"
    return Path.home() / ".cache" / "tidemill"


def fault(folder: Path) -> str | None:
    """What is wrong with a built folder: None when every file of its manifest is there, byte for byte.

    Reads every byte (about 0.1 s for half a gigabyte that is in memory anyway), so a flipped bit shows too.
    """
    if not folder.is_dir():
        return "it is not there"
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if record_file(folder / name, sync=False).xxh3_128 != expected["xxh3_128"]:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return None


def is_built(folder: Path) -> bool:
    """Whether the folder was completed once (a cheap look for the manifest; `fault` is the thorough one)."""
    return (folder / MANIFEST).is_file()


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
        folder: the final place, below the cache.
        build: fills an empty folder; whatever it raises passes through and leaves nothing behind.
        progress: called with one line when something is awaited or rebuilt.
        needs_bytes: free disk space asked for before the build starts.
        lock_deadline_s: how long another process may take to build the same folder.

    Raises:
        UserError: the cache cannot be written or the disk is full.
        DeadlineError: another process held the lock for too long.
    """
    if is_built(folder) and fault(folder) is None:
        return folder
    with _writable(folder.parent):
        _make(folder.parent)
        with _locked(folder, progress, lock_deadline_s):
            _sweep(folder)
            damage = fault(folder)
            if damage is None:
                return folder  # another process built it meanwhile
            if folder.exists():
                progress(f"{folder}: the cached copy is damaged ({damage}); building it again")
            _check_space(folder.parent, needs_bytes)
            _build(folder, build)
    return folder


def _make(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # a place that takes no folders at all, such as /proc
        raise NotADirectoryError(errno.ENOTDIR, error.strerror, str(parent)) from error


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=_temporary_prefix(folder), dir=folder.parent))
    try:
        build(partial)
        _seal(partial)
        if folder.exists():  # damaged: move it aside, since a rename onto a folder that has files fails
            folder.rename(partial.with_name(partial.name + "-old"))
        partial.rename(folder)
        make_durable(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sweep(folder)


def _seal(folder: Path) -> None:
    """Write the manifest of every file, and make all of it durable before it gets its final name."""
    folder.chmod(0o755)  # mkdtemp makes it private
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): msgspec.to_builtins(record_file(path)) for path in paths}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    for path in (manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        make_durable(path)


def _sweep(folder: Path) -> None:
    """Remove what killed builds of this folder left. Only called with the lock held, so nobody is using them."""
    for leftover in folder.parent.glob(_temporary_prefix(folder) + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _temporary_prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


@contextmanager
def _locked(folder: Path, progress: Progress, deadline_s: float) -> Iterator[None]:
    """Hold the folder's lock. The system releases it when its holder dies, however it dies."""
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
            holder = _holder(owner_path)
            if waited_s >= deadline_s:
                raise DeadlineError(
                    f"{holder} to finish building {folder.name}", waited_s=waited_s, look_at=str(lock_path)
                ) from None
            progress(f"waiting for {holder} to finish building {folder.name} ({waited_s:.0f} s; lock {lock_path})")
            next_report_s = min(_REPORT_EVERY_S, deadline_s - waited_s)
    try:
        owner_path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        owner_path.unlink(missing_ok=True)
        lock.release()


def _holder(owner_path: Path) -> str:
    try:
        return owner_path.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"


@contextmanager
def _writable(parent: Path) -> Iterator[None]:
    """Turn the faults of a disk into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                "the disk is full", where=str(parent), hint="free some space, or set TIDEMILL_CACHE to another disk"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"the cache cannot be written ({error.strerror})",
                where=str(parent),
                hint="make it writable, or set TIDEMILL_CACHE to another folder",
            ) from error
        raise


def _check_space(parent: Path, needs_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needs_bytes:
        raise UserError(
            f"{needs_bytes / 1e9:.1f} GB are needed but only {free / 1e9:.1f} GB are free",
            where=str(parent),
            hint="free some space, or set TIDEMILL_CACHE to another disk",
        )
