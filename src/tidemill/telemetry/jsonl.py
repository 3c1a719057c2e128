"""JSON lines files that survive a kill during a write, and small files that are replaced atomically."""

from __future__ import annotations

import errno
import math
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.errors import UserError
from tidemill.telemetry.followed_file import FollowedFile, line_object

BLOCK_BYTES = 1 << 16
PARTIAL = ".partial"


def finite_number(value: Any) -> float | None:
    """A JSON value as a finite float; None for anything else, booleans included."""
    if type(value) is float:  # first, because there are a million of them
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def _scalar_or_text(value: Any) -> Any:
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def encode(record: Any) -> bytes:
    """One JSON document without a line break.

    NaN and infinities become null, numpy and torch scalars numbers, other foreign objects text.
    """
    return msgspec.json.encode(record, enc_hook=_scalar_or_text)


def disk_error(error: OSError, path: Path) -> UserError:
    """A UserError for an operating-system error on `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, hint = "the disk is full", "free some space and run the same command again; the run resumes"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what, hint = "not writable", "choose another --run.dir or change the permissions of this one"
    else:
        what = error.strerror or str(error)
        hint = "choose another --run.dir, or check the disk and run the same command again"
    return UserError(what, where=str(path), hint=hint)


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` with `data`: readers and kills see the old file or the new one, never a mixture.

    Of several processes that write the same file at once, the last one's data stay.

    Args:
        durable: it survives a power cut once this returns, which takes the disk some milliseconds.

    Raises:
        UserError: the disk is full or the directory is not writable; the old file is untouched.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes left of `write_atomically`. No process may be writing a file of the folder."""
    for partial in folder.glob(f".*{PARTIAL}"):
        if partial.is_file():
            partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with indented JSON. Raises UserError as `write_atomically`."""
    write_atomically(path, msgspec.json.format(encode(value)) + b"\n")


def drop_torn_line(path: Path) -> int:
    """Remove an incomplete last line. Returns the bytes removed; 0 for a missing file."""
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


def read_lines(path: Path, *, last_bytes: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset, object) of every complete line of a file that may still be written to.

    Unreadable lines are skipped; a missing file has no lines.

    Args:
        last_bytes: only the lines that begin in the last so many bytes; 0: all.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        offset = max(0, os.fstat(file.fileno()).st_size - last_bytes - 1) if last_bytes else 0
        if offset:
            file.seek(offset)
            offset += len(file.readline())
        for line in file:
            if line.endswith(b"\n") and (record := line_object(line)) is not None:
                yield offset, record
            offset += len(line)


class SharedLines:
    """A JSON lines file that several processes append to, and that each reads from where it left off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = FollowedFile(path)

    def append(self, record: Any) -> None:
        """Append one line with one system call, after the torn line of a killed process if there is one.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = size > 0 and file.read(1) != b"\n"
            line = b"\n" * torn + encode(record) + b"\n"
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def new_lines(self) -> list[dict[str, Any] | None]:
        """The complete lines since the last call, None for unreadable ones. A missing file has no lines."""
        return [line for lines, _ in self._read.new_lines() for line in lines]


class JsonlWriter:
    """Appends one line per system call: neither a kill nor another thread can interleave lines."""

    def __init__(self, path: Path) -> None:
        """Remove an incomplete last line and open the file for appending.

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
            UserError: the disk is full; the file then ends with its last complete line.
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
