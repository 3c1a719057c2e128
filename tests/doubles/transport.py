"""A transport between machines that counts its reads, delays them and returns damaged blobs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tidemill.weights.snapshot import Blob, MemoryTransport, allocate


class FaultyTransport(MemoryTransport):
    def __init__(self, *, zero_copy: bool = True) -> None:
        super().__init__(zero_copy=zero_copy)
        self.reads: list[str] = []
        self.nbytes = 0  # of all reads
        self.delay_s = 0.0  # per read
        self._faults: dict[str, deque[Callable[[Blob], Blob]]] = {}

    def spoil(self, kind: str, fault: Callable[[Blob], Blob], *, times: int = 1) -> None:
        """Make the next `times` reads of a "manifest", "snapshot" or "delta" return `fault(blob)`."""
        self._faults.setdefault(kind, deque()).extend([fault] * times)

    async def get(self, name: str) -> Blob:
        self.reads.append(name)
        await asyncio.sleep(self.delay_s)
        blob = await super().get(name)
        self.nbytes += len(blob)
        faults = self._faults.get(name.rsplit(".", 1)[-1])
        return faults.popleft()(blob) if faults else blob


def torn(blob: Blob) -> Blob:
    """The first half: a torn write."""
    return blob[: len(blob) // 2]


def corrupt(blob: Blob) -> Blob:
    """A copy with one flipped bit."""
    wrong = allocate(len(blob))
    wrong[:] = blob
    wrong[len(wrong) // 2] ^= 4
    return wrong
