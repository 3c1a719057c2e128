"""JSON lines that survive being killed half-way, and small files written all or nothing."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.records import decode_json

BLOCK_BYTES = 1 << 16
LARGEST = 1e100
"""Beyond it nothing was measured: squares of such numbers leave the range of floats."""


def finite_number(value: Any) -> float | None:
    """A value of a line as a number; None if it is none, or none that can be computed with."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None


def _plain(value: Any) -> Any:
    """What JSON has no word for: numpy and torch scalars by value, anything else as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def encode(record: Any) -> bytes:
    """One JSON document without a line break; NaN and infinities become null."""
    return msgspec.json.encode(record, enc_hook=_plain)


def disk_error(error: OSError, path: Path) -> UserError:
    """Say an operating-system error on `path` in words a user can act on."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, hint = "the disk is full", "free some space and run the same command again; the run resumes where it was"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what, hint = "not writable", "choose another --run.dir or change the permissions of this one"
    else:
        what, hint = (
            error.strerror or str(error),
            "choose another --run.dir, or check the disk and run the same command again",
        )
    return UserError(what, where=str(path), hint=hint)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` with `data`; a reader or a kill sees the old file or the new one, never a mixture.

    Raises:
        UserError: the disk is full or the directory is not writable; the old file is untouched.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def drop_torn_line(path: Path) -> int:
    """Cut what a kill left after the last line break. Returns the bytes cut; a missing file is fine."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return 0
    with file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
        return size - end


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset, object) of every whole line of a file that may still be written to.

    A torn or unreadable line is passed over; a missing file has no lines.
    """
    for offset, record in _whole_lines(path):
        if record is not None:
            yield offset, record


def readable_lines(path: Path) -> tuple[int, int]:
    """(lines that can be read, whole lines)"""
    found = [record is not None for _, record in _whole_lines(path)]
    return sum(found), len(found)


def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """None for an unreadable one."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        offset = 0
        for line in file:
            if line.endswith(b"\n"):
                try:
                    yield offset, decode_json(line, dict)
                except msgspec.DecodeError:
                    yield offset, None
            offset += len(line)


class JsonlWriter:
    """Appends one line per system call, so that neither a kill nor another thread can interleave lines."""

    def __init__(self, path: Path) -> None:
        """Cut a torn last line and open for appending.

        Raises:
            UserError: the file cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        try:
            drop_torn_line(path)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(error, path) from error

    def write(self, record: Any) -> None:
        """Append one line.

        Raises:
            UserError: the disk is full; the file is cut back to its last whole line.
        """
        line = encode(record) + b"\n"
        with self._lock:
            written = 0
            try:
                while written < len(line):
                    written += os.write(self._fd, line[written:])
            except OSError as error:
                if written:
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise disk_error(error, self._path) from error

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
