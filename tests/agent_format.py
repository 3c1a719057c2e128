"""A format of turns without a model: one token per character, calls as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tidemill.agents.pool import EnvironmentPool
from tidemill.core.records import (
    Call,
    Episode,
    Message,
    Observation,
    ParsedTurn,
    Prompt,
    SampleId,
    ToolRequest,
    Turn,
    pack_tokens,
)


class LineFormat:
    """A line that starts with `{` is a call: `{"name": …, "arguments": …}`. Token ids are code points."""

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[int]]:
        text = "\n".join(message.content for message in messages)
        return text, self.encode_text(text)

    def parse(self, text: str) -> ParsedTurn:
        said, calls = [], []
        for line in text.splitlines():
            if not line.startswith("{"):
                said.append(line)
                continue
            try:
                call = json.loads(line)
                calls.append(ToolRequest(name=call["name"], arguments=json.dumps(call["arguments"])))
            except ValueError:
                calls.append(ToolRequest(name="", arguments=line, error="the call is not JSON"))
        return ParsedTurn(text="\n".join(said), calls=tuple(calls))

    def answer(
        self, episode: Episode, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[int], bool]:
        return self.encode_text("".join(message.content for message in messages)), False

    def encode_text(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class Log:
    """Records what is journalled."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: dict[int, Call] = {}

    async def started(self, index: int) -> None:
        self.starts.append(index)

    async def ended(self, index: int, call: Call) -> None:
        self.ends[index] = call


def call(name: str, **arguments: object) -> str:
    """Text of a call."""
    return json.dumps({"name": name, "arguments": arguments}) + "\n"


class Play:
    """One episode against a pool, as the controller sees it."""

    def __init__(self, pool: EnvironmentPool, task: dict[str, Any], first: str = "", *, index: int = 0) -> None:
        self.pool = pool
        self.sample_id = SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=index)
        self.prompt = Prompt(prompt_id="p", token_ids=b"", text=first, answer="", metadata={"task": task})
        self.turns: list[Turn] = []
        self.log = Log()

    async def act(
        self,
        text: str,
        *,
        finished: dict[int, Call] | None = None,
        started: tuple[int, ...] = (),
    ) -> Observation:
        turn = Turn(start=0, end=0, text=text)
        episode = Episode(
            sample_id=self.sample_id,
            prompt=self.prompt,
            turns=(*self.turns, turn),
            token_ids=pack_tokens([]),
            finished=finished or {},
            started=started,
        )
        seen = await self.pool.act(episode, self.log)
        self.turns.append(
            Turn(
                start=0,
                end=0,
                text=text,
                observation=seen.text,
                reward=seen.reward,
                calls=seen.calls,
                timeouts=seen.timeouts,
            )
        )
        return seen
