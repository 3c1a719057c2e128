"""A reader pins a checkpoint, and retention keeps it meanwhile: file locks on its manifest.

The operating system releases the lock when the reader ends, however it ends. On a file system without locks nothing is
pinned.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.models.checkpoint_manifest import MANIFEST


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
