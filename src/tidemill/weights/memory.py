"""Published weights within one process; and every way a transfer can go wrong, on request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tidemill.weights.snapshot import allocate
from tidemill.weights.transport import Blob, Missing


class MemoryTransport:
    """Implements `weights.transport.Transport`: `get` returns the very memory that was put, marked read-only.

    Args:
        zero_copy: False makes `get` copy, as a transfer between machines would.
    """

    def __init__(self, *, zero_copy: bool = True) -> None:
        self.zero_copy = zero_copy
        self.blobs: dict[str, Blob] = {}
        self.reads: list[str] = []
        self.delay_s = 0.0  # of every read
        self._faults: dict[str, deque[Callable[[Blob], Blob]]] = {}

    def spoil(self, kind: str, fault: Callable[[Blob], Blob], *, times: int = 1) -> None:
        """Let the next reads of names that end in `kind` ("manifest", "snapshot", "delta") return `fault(blob)`."""
        self._faults.setdefault(kind, deque()).extend([fault] * times)

    async def put(self, name: str, blob: Blob) -> None:
        kept = blob.view()
        kept.flags.writeable = False
        self.blobs[name] = kept

    async def get(self, name: str) -> Blob:
        self.reads.append(name)
        await asyncio.sleep(self.delay_s)
        if name not in self.blobs:
            raise Missing(f"there is no {name}")
        blob = self.blobs[name]
        if not self.zero_copy:
            blob, source = allocate(len(blob)), blob
            blob[:] = source
        faults = self._faults.get(name.rsplit(".", 1)[-1])
        return faults.popleft()(blob) if faults else blob

    async def delete(self, name: str) -> None:
        self.blobs.pop(name, None)

    async def close(self) -> None:
        self.blobs.clear()


def torn(blob: Blob) -> Blob:
    """The first half, as when the writer died."""
    return blob[: len(blob) // 2]


def corrupt(blob: Blob) -> Blob:
    """One bit is wrong."""
    wrong = allocate(len(blob))
    wrong[:] = blob
    wrong[len(wrong) // 2] ^= 4
    return wrong
