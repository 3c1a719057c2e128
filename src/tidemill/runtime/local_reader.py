"""A frozen model of this process as a reader: finished samples first, chunks ahead with what is left over."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tidemill.controller.in_flight import TRAIN
from tidemill.core.buffers import ITEM_BYTES, TokenBuffer
from tidemill.core.protocols import Compute
from tidemill.core.records import Growth, Read, SampleId
from tidemill.runtime.compute import ComputeThread
from tidemill.trainer.chunked_reader import ChunkedReader

T = TypeVar("T")


class Counted:
    """How much of what training samples took was done before they were finished, and how much afterwards."""

    def __init__(self) -> None:
        self._ahead = self._late = 0

    def note(self, sample_id: SampleId, read: Read) -> None:
        if sample_id.purpose == TRAIN:
            self._ahead += read.tokens_ahead
            self._late += read.tokens_late

    def take_counts(self) -> tuple[int, int]:
        counts, self._ahead, self._late = (self._ahead, self._late), 0, 0
        return counts


@dataclass(slots=True)
class _Growing:
    """What is known of a sample under way."""

    prompt_tokens: int
    token_ids: bytearray = field(default_factory=bytearray)


class LocalReader(Counted):
    """Implements `core.protocols.Reader`.

    One chunk is one call, so that whoever computes on the same thread has its turn in between. Finished samples are
    read one after another; chunks ahead by turns, one of each sample.

    Args:
        thread: where the model computes.
        owned: nobody else does; the thread ends with the reader. Otherwise chunks ahead wait until it is idle.
    """

    def __init__(self, reader: ChunkedReader, thread: ComputeThread, *, owned: bool) -> None:
        super().__init__()
        self._reader, self._thread, self._owned = reader, thread, owned
        self._leftover: Compute = thread if owned else thread.leftover
        self._growing: dict[SampleId, _Growing] = {}
        self._ready: dict[SampleId, None] = {}  # samples that may have a chunk to be computed ahead, in order
        self._being_read = Counter[SampleId]()
        self._forgotten: deque[SampleId] = deque()  # the model's side is told at the next call
        self._working: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._turn = asyncio.Lock()

    def grow(self, grown: Sequence[Growth]) -> None:
        for growth in grown:
            if growth.sample_id in self._being_read:
                continue  # what it was before it began again: one chain of chunks under a name is enough
            if growth.start == 0:
                self._growing[growth.sample_id] = _Growing(growth.prompt_tokens)
            growing = self._growing.get(growth.sample_id)
            if growing is None or len(growing.token_ids) != growth.start * ITEM_BYTES:
                self.forget([growth.sample_id])  # something in between was lost: it is read at the end
                continue
            growing.token_ids += growth.token_ids
            self._ready[growth.sample_id] = None
        if self._ready and self._working is None and self._failure is None:
            self._working = asyncio.create_task(self._read_ahead(), name="reading ahead")

    async def read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        """
        Raises:
            Exception: what the model raised, also while it read ahead.
        """
        self._leave(sample_id)
        self._being_read[sample_id] += 1
        try:
            async with self._turn:
                read = await self._read(sample_id, token_ids, prompt_tokens)
        finally:
            self._being_read -= Counter([sample_id])
        self.note(sample_id, read)
        return read

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        for sample_id in sample_ids:
            self._leave(sample_id)
            self._forgotten.append(sample_id)

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        if self._owned:
            await self._thread.close()

    def _leave(self, sample_id: SampleId) -> None:
        self._growing.pop(sample_id, None)
        self._ready.pop(sample_id, None)

    async def _read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        if self._failure is not None:
            raise self._failure
        read: Read | None = None
        try:
            while read is None:
                read = await self._call(self._thread, lambda: self._reader.read_on(sample_id, token_ids, prompt_tokens))
        except BaseException:
            self._forgotten.append(sample_id)
            raise
        return read

    async def _read_ahead(self) -> None:
        try:
            while self._ready:
                sample_id = next(iter(self._ready))
                del self._ready[sample_id]
                if await self._chunk_ahead(sample_id) and sample_id in self._growing:
                    self._ready[sample_id] = None  # behind the others
        except Exception as error:  # noqa: BLE001 - whoever reads next gets it
            self._failure = error
        finally:
            self._working = None

    async def _chunk_ahead(self, sample_id: SampleId) -> bool:
        growing = self._growing[sample_id]
        known = bytes(growing.token_ids)

        def chunk() -> bool:
            if sample_id not in self._growing:  # finished or forgotten while this waited for its turn
                return False
            return self._reader.read_ahead(sample_id, known, growing.prompt_tokens)

        return await self._call(self._leftover, chunk)

    async def _call(self, compute: Compute, function: Callable[[], T]) -> T:
        def call() -> T:
            while self._forgotten:
                self._reader.forget(self._forgotten.popleft())
            return function()

        return await compute.run(call)
