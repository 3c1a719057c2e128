"""From tokens to what a client sees: text without halves of characters, without stop strings, and tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Literal, Self

from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Finish, Record, ToolRequest
from tidemill.gateway.calls import CallReader, Parse, opens_thought
from tidemill.gateway.requests import CompletionParams

Decode = Callable[[Sequence[int]], str]
FinishReason = Literal["stop", "length", "tool_calls"]

HELD_TOKENS = 16
"""Tokens that are decoded again with new ones, because decoders change what a text begins with."""
CHARACTER_BYTES = 4


class ChoiceDelta(Record):
    """News of one choice."""

    parts: tuple[str | ToolRequest, ...] = ()  # texts and calls, in order
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolRequest]:
        return [part for part in self.parts if isinstance(part, ToolRequest)]


class ChoiceText:
    """The text of one choice while its tokens arrive.

    Args:
        stops: strings that end the text and are not part of it.
        parse, tools, thinking: see `CallReader`; no parser without tools.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        stops: Sequence[str],
        parse: Parse | None,
        tools: Container[str] | None = None,
        thinking: bool = False,
    ) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._reader = CallReader(parse, tools, thinking=thinking) if parse is not None else None
        self._ids: list[int] = []
        self._start = self._read = 0  # tokens [start, read) are decoded again, as the context of the next
        self._ends: deque[int] = deque([0])  # tokens up to `start` and later ends of whole characters
        self._text = ""  # everything decoded
        self._shown = 0  # characters of it

    @classmethod
    def answering(
        cls,
        params: CompletionParams,
        prompt_ids: Sequence[int],
        *,
        format: TurnFormat,  # noqa: A002 - as in Served
        stops: Sequence[str],
    ) -> Self:
        """The text of an answer."""
        if not params.tools:
            return cls(format.decode, stops=stops, parse=None)
        names = {tool["function"]["name"] for tool in params.tools}
        thinking = opens_thought(format.decode, prompt_ids)
        return cls(format.decode, stops=stops, parse=format.parse, tools=names, thinking=thinking)

    def feed(self, token_ids: Sequence[int], finish: Finish | None) -> ChoiceDelta:
        """The news after some tokens; the last ones come with the finish."""
        self._ids += token_ids
        self._text += self._decoded(final=finish is not None)
        end = self._end(finish)
        new, self._shown = self._text[self._shown : end], max(self._shown, end)
        parts = self._reader.read(new, finish) if self._reader is not None else [new] if new else []
        reason: FinishReason | None = None
        if finish == "length":
            reason = "length"
        elif finish is not None:
            reason = "tool_calls" if self._reader is not None and self._reader.called else "stop"
        return ChoiceDelta(parts=tuple(parts), finish=reason)

    def _decoded(self, *, final: bool) -> str:
        """The text of new tokens whose characters are whole."""
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        end = len(self._ids)
        if not final and after.endswith("\ufffd"):
            # The last character may be whole with the next token, or never.
            ends = range(end - 1, max(self._read, end - 2 * CHARACTER_BYTES), -1)
            texts = [(at, self._decode(self._ids[self._start : at])) for at in ends]
            whole = [one for one in texts if not one[1].endswith("\ufffd")]
            whole += [one for one in texts if one[0] <= end - CHARACTER_BYTES + 1 and after.startswith(one[1])]
            end, after = whole[0] if whole else (self._read, before)
        if end > self._read:
            self._read = end
            self._ends.append(end)
            while self._ends[1] <= end - HELD_TOKENS:
                self._ends.popleft()
            self._start = self._ends[0]
        return after[len(before) :]

    def _end(self, finish: Finish | None) -> int:
        """End of the text before a stop string, which may have begun many tokens before, and before what later tokens
        can turn into one."""
        if finish not in (None, "stop"):
            return len(self._text)
        found = [at for stop in self._stops if (at := self._text.find(stop, max(0, self._shown - len(stop)))) >= 0]
        if finish is None:
            longest = max(map(len, self._stops), default=1)
            for at in range(max(self._shown, len(self._text) - longest + 1), len(self._text)):
                if any(stop.startswith(self._text[at:]) for stop in self._stops):
                    found.append(at)
                    break
        return max(min(found, default=len(self._text)), self._shown)
