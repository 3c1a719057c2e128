"""Reads a JSON lines file while another process appends to it, rewinds it or replaces it.

A rewound file may have grown past the place that was read last before a reader looks again. Three things tell:
the inode, the generation in the run's manifest, which rises before and after each truncation, and the last line that
was read, which must still end there (copies, and runs of older versions, may have no generation).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tidemill.core.records import decode_json

BLOCK_BYTES = 1 << 20

Signature: TypeAlias = tuple[int, int, int]
"""(inode, bytes, time of the last change in ns): equal while a file does not change."""


def signature(path: Path) -> Signature | None:
    """None if there is no such file or folder, or it is neither."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    plain = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)  # opening a pipe would wait for a writer
    return (found.st_ino, found.st_size, found.st_mtime_ns) if plain else None


class FollowedFile:
    """A file and the place up to which it was read.

    Args:
        generation: of the history, read again after each block: a block read before the generation rose is discarded.
    """

    def __init__(self, path: Path, generation: Callable[[], int] = lambda: 0) -> None:
        self.path = path
        self._read_generation = generation
        self.generation = generation()
        self.replaced = 0  # times that the history changed without a new generation
        self._start_over()

    def _start_over(self) -> None:
        self.inode = 0
        self.lines = 0
        self.unreadable = 0
        self._offset = 0  # behind the last complete line
        self._last_line = b""
        self._seen: Signature | None = None  # when the file was last read to its end

    def new_lines(self) -> Iterator[tuple[list[dict[str, Any] | None], bool]]:
        """The complete lines since the last call, in blocks: objects, None for unreadable lines, and whether the
        history was replaced, so that all earlier lines are void. Nothing without a change; a missing file has no lines.

        Raises:
            OSError: the file cannot be read.
        """
        while True:
            complete, replaced = self._next_block()
            generation = self._read_generation()
            if generation != self.generation:
                self.generation = generation
                self._start_over()
                yield [], True
                continue
            self.replaced += replaced
            lines = [line_object(line) for line in complete.split(b"\n")[:-1]]
            self.lines += len(lines)
            self.unreadable += lines.count(None)
            if lines or replaced:
                yield lines, replaced
            if not lines:
                return

    def _next_block(self) -> tuple[bytes, bool]:
        """The next complete lines, and whether they are of another history than those before."""
        now, replaced = signature(self.path), False
        if now is None:
            replaced = self._offset > 0
            self._start_over()
            return b"", replaced
        if now == self._seen:
            return b"", False
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return b"", False  # deleted since: the next call finds nothing
        with file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset - len(self._last_line))
            if self._offset and (inode != self.inode or file.read(len(self._last_line)) != self._last_line):
                replaced = True
                self._start_over()
                file.seek(0)
            self.inode = inode
            block = file.read(BLOCK_BYTES)
            if len(block) == BLOCK_BYTES and b"\n" not in block:  # a very long line
                block += file.readall()
        complete = block[: block.rfind(b"\n") + 1]
        if complete:
            self._offset += len(complete)
            self._last_line = complete[complete.rfind(b"\n", 0, -1) + 1 :]
        if len(block) < BLOCK_BYTES:
            self._seen = now
        return complete, replaced


def line_object(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if it has none."""
    try:
        return decode_json(line, dict)
    except msgspec.DecodeError:
        return None
