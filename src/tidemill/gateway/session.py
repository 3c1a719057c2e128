"""One sample's session: its state, the answers that are generated, and what its client did beside its requests."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidemill.core.records import ITEM_BYTES, Prompt, Record, SampleId, count
from tidemill.gateway.backend import CompletionRequest, TokenChunk
from tidemill.gateway.errors import ApiError
from tidemill.gateway.matching import Captured


class Session:
    """One sample's session."""

    def __init__(self, name: str, key: str, sample_id: SampleId, prompt: Prompt) -> None:
        self.name, self.key, self.prompt = name, key, prompt
        self.place = sample_id.prompt_id, sample_id.epoch  # of the sample's group
        self.attached = self.ending = self.failed = self.ended = False
        self.expires_s = 0.0  # unix seconds
        self.reward: float | None = None
        self.turn_rewards: dict[int, float] = {}
        self.group = self.opened_by = ""
        self.metadata: dict[str, Any] = {}
        self.live: LiveAnswer | None = None
        self.choice = 0  # answer of `live` that is generated
        self.request: CompletionRequest | None = None  # that waits for the environment, or whose `live` is generated
        self.captured: Captured | None = None  # at the end of the last turn
        self.woken = asyncio.Event()

    def recall(self, noted: SessionEvent) -> None:
        """Apply an event of the log."""
        self.attached = True
        if noted.event == "attached":
            self.metadata, self.group, self.opened_by = noted.metadata, noted.group, noted.opened_by
        elif noted.event in ("ended", "failed"):
            self.ending, self.failed = True, noted.event == "failed"
        elif noted.turn is None:
            self.reward = noted.value
        else:
            self.turn_rewards[noted.turn] = noted.value


class LiveAnswer:
    """The chunks of all answers to a request, for everybody who asks for them.

    Args:
        n: answers.
    """

    def __init__(self, state_key: str, n: int) -> None:
        self.state_key, self.left, self.chunks = state_key, n, list[TokenChunk]()
        self.error: ApiError | None = None
        self.received = Counter[int]()  # tokens, by answer
        self._changed = asyncio.Event()

    @property
    def open(self) -> bool:
        return self.left > 0 and self.error is None

    def add(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        self.left -= chunk.finish is not None
        self.received[chunk.index] += count(chunk.token_ids)
        self._wake()

    def complete(self, captured: Captured, turns: Sequence[int]) -> None:
        """Add what the answers lack of turns that have ended, the first of them answer 0."""
        finished = {chunk.index for chunk in self.chunks if chunk.finish is not None}
        for index, turn in enumerate(turns):
            if index not in finished:
                known = self.received[index] * ITEM_BYTES
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


class SessionEvent(Record, omit_defaults=True):
    """A line of the log: a session that a client opened or ended, or a reward that it gave."""

    session: str
    event: Literal["attached", "reward", "ended", "failed"]
    value: float = 0.0
    turn: int | None = None  # of the reward; None: of the whole session
    group: str = ""  # the client's name for it
    metadata: dict[str, Any] = {}  # of the client that opened it
    opened_by: str = ""  # digest of its retry key


class SessionLog:
    """Appends a line for each event; when `write` returns it is durable. A torn last line is ignored.

    Attributes:
        earlier: the events of each session before a restart, in their order.
        opened_by: names of sessions of before a restart by `SessionEvent.opened_by`.
    """

    def __init__(self, path: Path) -> None:
        self.earlier = defaultdict[str, list[SessionEvent]](list)
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                noted = msgspec.json.decode(line, type=SessionEvent)
            except msgspec.DecodeError:
                continue
            self.earlier[noted.session].append(noted)
        self.opened_by = {
            each.opened_by: name for name, noted in self.earlier.items() for each in noted if each.opened_by
        }
        self._file = path.open("ab", buffering=0)
        if path.stat().st_size:
            self._file.write(b"\n")  # after a torn line

    def write(self, noted: SessionEvent) -> None:
        self._file.write(msgspec.json.encode(noted) + b"\n")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
