"""The answers to one request while they are generated, and for its repetitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from tidemill.core.records import ITEM_BYTES, count
from tidemill.gateway.backend import TokenChunk
from tidemill.gateway.captured import Captured
from tidemill.gateway.errors import ApiError


class LiveAnswer:
    """The chunks of all answers to a request, for everybody who asks for them.

    Args:
        n: answers.
    """

    def __init__(self, state_key: str, n: int) -> None:
        self.state_key, self.left, self.chunks = state_key, n, list[TokenChunk]()
        self.error: ApiError | None = None
        self._received: dict[int, int] = {}  # tokens by answer
        self._changed = asyncio.Event()

    @property
    def open(self) -> bool:
        return self.left > 0 and self.error is None

    def received(self, index: int) -> int:
        """Tokens of an answer so far."""
        return self._received.get(index, 0)

    def add(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        self.left -= chunk.finish is not None
        self._received[chunk.index] = self.received(chunk.index) + count(chunk.token_ids)
        self._wake()

    def complete(self, captured: Captured, turns: Sequence[int]) -> None:
        """Add what the answers lack of turns that have ended, the first of them answer 0."""
        finished = {chunk.index for chunk in self.chunks if chunk.finish is not None}
        for index, turn in enumerate(turns):
            if index not in finished:
                known = self.received(index) * ITEM_BYTES
                token_ids, logprobs = (part[known:] for part in captured.turn_tokens(turn))
                finish = captured.turns[turn].finish
                self.add(TokenChunk(index=index, token_ids=token_ids, logprobs=logprobs, finish=finish))

    def fail(self, error: ApiError) -> None:
        if self.open:
            self.error = error
            self._wake()

    async def read(self) -> AsyncGenerator[TokenChunk, None]:
        """All chunks from the start. Raises ApiError: the session has ended."""
        at = 0
        while True:
            changed = self._changed
            while at < len(self.chunks):
                at += 1
                yield self.chunks[at - 1]
            if not self.left:
                return
            if self.error is not None:
                raise self.error
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
