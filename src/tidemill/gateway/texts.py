"""From tokens to what a client sees: text without halves of characters, without stop strings, and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from tidemill.core.records import Finish, ParsedTurn, Record, ToolRequest

Decode = Callable[[Sequence[int]], str]
Parse = Callable[[str], ParsedTurn]
FinishReason = Literal["stop", "length", "tool_calls"]

CALL_STARTS = ("<tool_call>", "<|python_tag|>")
CALL_END = "</tool_call>"
BARE_CALL = re.compile(r"\s*\{")
"""Llama models may write a call without a mark, as the whole text."""
HELD_TOKENS = 16
"""Tokens that are decoded together, so that characters of several tokens are whole."""


class ChoiceDelta(Record):
    """News of one choice."""

    text: str = ""
    calls: tuple[ToolRequest, ...] = ()
    finish: FinishReason | None = None


class ChoiceText:
    """The text of one choice while its tokens arrive.

    Args:
        stops: strings that end the text and are not part of it.
        parse: reads tool calls; None without tools.
    """

    def __init__(self, decode: Decode, *, stops: Sequence[str], parse: Parse | None) -> None:
        self._decode, self._stops, self._parse = decode, tuple(stops), parse
        self._ids: list[int] = []
        self._start = self._read = 0  # tokens [start, read) are decoded again, as the context of the next
        self._text = ""  # everything decoded
        self._shown = 0  # characters of it
        self._calls = 0

    def feed(self, token_ids: Sequence[int], finish: Finish | None) -> ChoiceDelta:
        """The news after some tokens; the last ones come with the finish."""
        self._ids += token_ids
        self._text += self._decoded(final=finish is not None)
        if finish is None:
            return ChoiceDelta(text=self._show(self._safe_end()), calls=self._whole_calls())
        end = self._stopped_at() if finish == "stop" else len(self._text)
        self._text = self._text[:end]
        if self._parse is None:
            return ChoiceDelta(text=self._show(end), finish="length" if finish == "length" else "stop")
        return self._last(self._parse(self._text), finish)

    def _last(self, turn: ParsedTurn, finish: Finish) -> ChoiceDelta:
        calls = turn.calls[self._calls :]
        if not turn.calls:
            return ChoiceDelta(text=self._show(len(self._text)), finish="length" if finish == "length" else "stop")
        # What was shown is the start of what the model said beside its calls.
        shown = self._text[: self._shown].strip()
        rest = turn.text[len(shown) :] if turn.text.startswith(shown) else ""
        self._calls = len(turn.calls)
        return ChoiceDelta(text=rest, calls=calls, finish="length" if finish == "length" else "tool_calls")

    def _decoded(self, *, final: bool) -> str:
        """The text of new tokens; nothing while the last character is incomplete."""
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if not final and after.endswith("\ufffd"):
            return ""
        self._start, self._read = max(self._start, self._read - HELD_TOKENS), len(self._ids)
        return after[len(before) :]

    def _show(self, end: int) -> str:
        found, self._shown = self._text[self._shown : end], max(self._shown, end)
        return found

    def _safe_end(self) -> int:
        """End of the text that no later token can turn into a stop string or a call."""
        marks = [*self._stops, *(CALL_STARTS if self._parse else ())]
        found = [at for mark in marks if (at := self._text.find(mark, max(0, self._shown - len(mark)))) >= 0]
        if self._parse and BARE_CALL.match(self._text):
            found.append(0)
        longest = max(map(len, marks), default=1)
        for at in range(max(self._shown, len(self._text) - longest + 1), len(self._text)):
            if any(mark.startswith(self._text[at:]) for mark in marks):
                found.append(at)
                break
        end = min([*found, len(self._text)])
        if self._parse:  # white space before a call is not said
            end = len(self._text[:end].rstrip())
        return max(end, self._shown)

    def _stopped_at(self) -> int:
        """A stop string ends at the last token; it may have begun many tokens before."""
        found = [at for stop in self._stops if (at := self._text.find(stop, max(0, self._shown - len(stop)))) >= 0]
        return min(found, default=len(self._text))

    def _whole_calls(self) -> tuple[ToolRequest, ...]:
        """Calls whose end has arrived."""
        if self._parse is None or CALL_END not in self._text:
            return ()
        calls = self._parse(self._text[: self._text.rindex(CALL_END) + len(CALL_END)]).calls
        new, self._calls = calls[self._calls :], max(self._calls, len(calls))
        return new
