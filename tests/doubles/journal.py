"""A journal in memory that can lose power in the middle of a write."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

HEADER = struct.Struct("<qII")  # step, payload bytes, CRC-32 of the payload


class PowerCut(Exception):
    """The simulated machine lost power; no handler may have lasting effects."""


class MemoryJournal:
    """Implements `core.protocols.Journal` over a byte string, framed and checksummed.

    Args:
        disk: the `disk` of an earlier journal.
        power_cut_after: bytes until the power cut; the append that reaches it is torn and never returns.
    """

    def __init__(self, disk: bytes = b"", *, power_cut_after: int | None = None) -> None:
        self._disk = bytearray(disk)
        self._left = power_cut_after
        self.written = 0  # bytes written
        self.appends = 0

    @property
    def disk(self) -> bytes:
        """The durable bytes."""
        return bytes(self._disk)

    async def append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        frames = b"".join(HEADER.pack(step, len(blob), zlib.crc32(blob)) + blob for step, blob in blobs)
        kept = frames if self._left is None else frames[: max(0, self._left - self.written)]
        self._disk += kept
        self.written += len(kept)
        self.appends += 1
        self._check_power()

    async def load(self) -> list[tuple[int, bytes]]:
        frames, end = self._frames()
        del self._disk[end:]  # torn; later appends must not follow it
        return [(step, blob) for step, blob in frames]

    async def prune(self, through_step: int) -> None:
        self._check_power()
        frames, _ = self._frames()
        kept = [(step, blob) for step, blob in frames if step > through_step]
        self._disk = bytearray(b"".join(HEADER.pack(s, len(b), zlib.crc32(b)) + b for s, b in kept))

    async def close(self) -> None:
        pass

    def _check_power(self) -> None:
        if self._left is not None and self.written >= self._left:
            raise PowerCut

    def _frames(self) -> tuple[list[tuple[int, bytes]], int]:
        """All complete frames, and the end of the last one."""
        frames, at = [], 0
        while at + HEADER.size <= len(self._disk):
            step, length, checksum = HEADER.unpack_from(self._disk, at)
            blob = bytes(self._disk[at + HEADER.size : at + HEADER.size + length])
            if len(blob) < length or zlib.crc32(blob) != checksum:
                break
            frames.append((step, blob))
            at += HEADER.size + length
        return frames, at
