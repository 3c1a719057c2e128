"""Tool calls in a text that grows: those that a client can make. Everything else that the model wrote is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache
from math import isfinite
from typing import Any

from tidemill.core.records import Finish, ParsedTurn, ToolRequest
from tidemill.gateway.requests import DEPTH, depth_of

Parse = Callable[[str], ParsedTurn]

THOUGHT, THOUGHT_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
MENTIONED = re.compile(rf"{CALL}\s*[^\s{{]")
"""A mark without a call after it."""
BARE_CALLS = ("{", "<|python_tag|>")
"""Llama models write calls without a mark of their end, and as the whole text."""
BARE_CALL = '{"name": "a"}'
THOUGHT_TOKENS = 16
"""Tokens of a prompt's end that are searched for the start of a thought."""


def opens_thought(decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends with the start of a thought, as in templates of models that always think."""
    return decode(prompt_ids[-THOUGHT_TOKENS:]).rstrip().endswith(THOUGHT)


class CallReader:
    """Splits a text into what is said and calls. What is no valid call is said, and so are thoughts with all in them.

    Args:
        parse: reads the calls of a text.
        tools: names that can be called; None: any.
        thinking: the prompt has opened a thought.

    Attributes:
        called: whether there was a call.
    """

    def __init__(self, parse: Parse, tools: Container[str] | None, *, thinking: bool) -> None:
        self._parse, self._tools = parse, tools
        self._bare = bool(parse(BARE_CALL).calls)
        self._text = ""
        self._at = 0  # what comes before has been given
        self._thinking = self._by_prompt = thinking
        self._begins = True  # nothing was said, or nothing after a thought
        self._space = ""  # before a call it is not said
        self._said = False
        self.called = False

    def read(self, new: str, finish: Finish | None) -> list[str | ToolRequest]:
        """What is said and called, in order, as far as no later text can change it."""
        self._text += new
        parts = list[str | ToolRequest]()
        for part in self._decided(finish):
            if isinstance(part, ToolRequest):
                self.called = True
                self._space = ""
                parts.append(part)
                continue
            text = self._space + part
            said = text.rstrip()
            self._space = text[len(said) :]
            if self.called and not self._said:
                said = said.lstrip()
            if said:
                self._said = True
                parts.append(said)
        if finish is not None and self._space and not self.called:
            parts.append(self._space)
        return parts

    def _decided(self, finish: Finish | None) -> Iterator[str | ToolRequest]:
        while self._at < len(self._text):
            marks = self._marks()
            start = self._first(marks, partly=finish is None)
            if start > self._at:
                yield self._take(start)
                continue
            mark = next((mark for mark in marks if self._text.startswith(mark, start)), "")
            if mark == THOUGHT:
                self._thinking, self._by_prompt = True, False
                yield self._take(start + len(mark))
            elif mark == THOUGHT_END:
                yield self._end_of_thought(start)
            elif not mark:  # only the start of one
                return
            elif self._thinking and (end := self._text.find(THOUGHT_END, start)) >= 0:
                yield self._end_of_thought(end)
            elif self._bare or self._thinking:
                if finish is None:
                    return
                if self._thinking and finish == "length":  # the thought was cut off
                    yield self._take(len(self._text))
                    return
                self._thinking = False  # the thought was none
                yield from self._bare_calls() if self._bare else ()
            elif (parts := self._marked_call(finish)) is None:
                return
            else:
                yield from parts

    def _marks(self) -> Sequence[str]:
        """What may begin or end something here."""
        if self._thinking and not self._by_prompt:
            return (THOUGHT_END,)
        calls = (CALL,) if not self._bare else BARE_CALLS if self._begins else ()
        return (THOUGHT_END if self._thinking else THOUGHT, *calls)

    def _first(self, marks: Sequence[str], *, partly: bool) -> int:
        """Where the first of some marks is, or, if `partly`, the start of one at the end of the text."""
        if (found := _any_of(tuple(marks)).search(self._text, self._at)) is not None:
            return found.start()
        longest = max(map(len, marks)) if partly else 1
        ends = range(max(self._at, len(self._text) - longest + 1), len(self._text))
        return next((at for at in ends if any(mark.startswith(self._text[at:]) for mark in marks)), len(self._text))

    def _take(self, end: int) -> str:
        part, self._at = self._text[self._at : end], end
        self._begins = self._begins and not part.strip()
        return part

    def _end_of_thought(self, at: int) -> str:
        part = self._take(at + len(THOUGHT_END))
        self._thinking, self._by_prompt, self._begins = False, False, True
        return part

    def _marked_call(self, finish: Finish | None) -> Sequence[str | ToolRequest] | None:
        """What starts with the mark of a call here; None: more text is needed."""
        start = self._at
        if MENTIONED.match(self._text, start):
            return [self._take(start + len(CALL))]
        end = self._text.find(CALL_END, start)
        if end < 0 and finish is None:
            return None
        whole = end >= 0 or finish == "stop"  # the end of a turn ends its call
        end = end + len(CALL_END) if end >= 0 else len(self._text)
        # A call that was broken off may come before a whole one: the last mark counts, too.
        for place in dict.fromkeys((start, self._text.rindex(CALL, start, end))) if whole else ():
            source = self._text[place:end]
            calls = self._parse(source).calls
            if len(calls) == 1 and calls[0].source == source and self._valid(calls[0]):
                before = self._take(place)
                self._take(end)
                return [before, calls[0]]
        return [self._take(end)]

    def _bare_calls(self) -> Iterator[str | ToolRequest]:
        """The calls at the end of a text, and what is none of them."""
        for call in self._parse(self._text[self._at :]).calls:
            if not self._text.startswith(call.source, self._at):
                break
            part = self._take(self._at + len(call.source))
            yield call if self._valid(call) else part
        self._begins = False

    def _valid(self, call: ToolRequest) -> bool:
        return not call.error and (self._tools is None or call.name in self._tools) and _portable(call)


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _portable(call: ToolRequest) -> bool:
    """Whether every client reads the same in a call: no key twice, no number beyond a float, and no deep nesting."""
    body = call.source[call.source.index("{") : call.source.rindex("}") + 1]
    try:
        return depth_of(json.loads(body, object_pairs_hook=_unique, parse_float=_finite)) <= DEPTH
    except (ValueError, RecursionError):
        return False


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _finite(number: str) -> float:
    if not isfinite(value := float(number)):
        raise ValueError(f"{number} is too large")
    return value
