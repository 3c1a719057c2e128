"""What the rows of the three kinds of data must hold: prompts with answers, demonstrations, preference pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.envs.text.data.rows import Row, read_rows
from tidemill.envs.text.prompts import Item, Question

PROMPT_SHAPE = (
    'a row looks like {"prompt": "2+2=", "answer": "4"} or {"messages": [{"role": "user", "content": …}], "answer": …}'
)
DEMONSTRATION_SHAPE = (
    'a row looks like {"prompt": "2+2=", "completion": "4"}, or has "messages" (role and content each) instead of '
    '"prompt"; messages that end with the assistant\'s need no completion'
)
PAIR_SHAPE = (
    'a row looks like {"prompt": "2+2=", "chosen": "4", "rejected": "5"}, or has "messages" (role and content each) '
    'instead of "prompt"; "margin" may be added'
)
ASSISTANT = "assistant"
CONTENT_FIELDS = frozenset({"prompt", "messages", "answer"})


class DemonstrationText(Question, kw_only=True):
    """A demonstration before any tokenizer has seen it."""

    completion: str

    @property
    def replies(self) -> tuple[str, ...]:
        return (self.completion,)


class PairText(Question, kw_only=True):
    """A preference pair before any tokenizer has seen it. Two rows that differ in the margin only are the same pair."""

    chosen: str
    rejected: str
    margin: float = 0.0

    @property
    def replies(self) -> tuple[str, ...]:
        return (self.chosen, self.rejected)


def read_items(path: Path) -> Iterator[Item]:
    """Prompts with their answers; what else a row holds is metadata.

    Raises:
        UserError: naming file, row and field of the first fault, and what to do.
    """
    for row in read_rows(path, section="task", shape=PROMPT_SHAPE):
        yield Item(
            messages=_messages(row, PROMPT_SHAPE),
            answer=_answer(row),
            plain=row.get("prompt") is not None,
            metadata={name: _metadata(row, name) for name in row.fields if name not in CONTENT_FIELDS},
            where=row.where,
        )


def read_demonstrations(path: Path) -> Iterator[DemonstrationText]:
    """Prompts with the completion to learn.

    Raises:
        UserError: as `read_items`.
    """
    for row in read_rows(path, section="data", shape=DEMONSTRATION_SHAPE):
        messages, completion = _messages(row, DEMONSTRATION_SHAPE), row.get("completion")
        if completion is None and row.get("prompt") is None and messages[-1].role == ASSISTANT:
            *asked, last = messages
            if not asked:
                _fault("`messages` holds nothing but the assistant's turn", row, DEMONSTRATION_SHAPE)
            messages, completion = tuple(asked), last.content
        yield DemonstrationText(
            messages=messages,
            completion=_reply(completion, "completion", row, DEMONSTRATION_SHAPE),
            plain=row.get("prompt") is not None,
            where=row.where,
        )


def read_pairs(path: Path) -> Iterator[PairText]:
    """Prompts with a better and a worse completion.

    Raises:
        UserError: as `read_items`; also for two sides that are the same text.
    """
    for row in read_rows(path, section="data", shape=PAIR_SHAPE):
        pair = PairText(
            messages=_messages(row, PAIR_SHAPE),
            chosen=_reply(row.get("chosen"), "chosen", row, PAIR_SHAPE),
            rejected=_reply(row.get("rejected"), "rejected", row, PAIR_SHAPE),
            margin=_margin(row),
            plain=row.get("prompt") is not None,
            where=row.where,
        )
        if pair.chosen == pair.rejected:
            raise identical_replies(pair)
        yield pair


def identical_replies(pair: PairText) -> UserError:
    """The fault of a pair that prefers nothing."""
    return UserError(
        f"`chosen` and `rejected` are the same, {pair.chosen[:40]!r}",
        where=pair.where,
        hint="leave the row out: a pair of equal sides says nothing",
    )


def _messages(row: Row, shape: str) -> tuple[Message, ...]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        there = ", ".join(f"`{name}`" for name in row.fields if row.get(name) is not None) or "nothing"
        _fault(f"expected either `prompt` or `messages`, found {there}", row, shape)
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt.strip():
            hint = "; a list of messages goes under `messages`" if isinstance(prompt, list) else ""
            _fault(f"`prompt` must be a text that is not empty{hint}", row, shape)
        return (Message(role="user", content=prompt),)
    if not isinstance(messages, list) or not messages:
        _fault("`messages` must be a list that is not empty", row, shape)
    return tuple(_message(message, "messages", row, shape) for message in messages)


def _message(message: Any, field: str, row: Row, shape: str) -> Message:
    # A table gives every message every field that any has, empty where there is none.
    given = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if set(given) != {"role", "content"}:
        _fault(f"each of `{field}` must have `role` and `content` and nothing else", row, shape)
    if not all(isinstance(value, str) and value for value in given.values()):
        _fault(f"`role` and `content` of `{field}` must be texts that are not empty", row, shape)
    return Message(**given)


def _answer(row: Row) -> str:
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        _fault('`answer` must be there, a text or a number ("" where no reward needs it)', row, PROMPT_SHAPE)
    return str(answer)


def _reply(value: Any, field: str, row: Row, shape: str) -> str:
    """A completion: its text, or a list with the assistant's message alone."""
    if isinstance(value, list):
        messages = [_message(message, field, row, shape) for message in value]
        if len(messages) != 1 or messages[0].role != ASSISTANT:
            _fault(f"`{field}` must be a text, or one message of the role {ASSISTANT}", row, shape)
        value = messages[0].content
    if value is None:
        _fault(f"`{field}` must be there", row, shape)
    if not isinstance(value, str):
        _fault(f"`{field}` must be a text, found {type(value).__name__}", row, shape)
    if not value.strip():
        _fault(f"`{field}` is empty", row, "leave the row out, or write the completion")
    return value


def _margin(row: Row) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin) or margin < 0:
        _fault(f"`margin` must be a number that is not negative, found {margin!r:.40}", row, PAIR_SHAPE)
    return float(margin)


def _metadata(row: Row, name: str) -> Any:
    value = row.get(name)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        found = type(value).__name__
        _fault(f"`{name}` holds a {found} that JSON cannot write", row, "convert that column to text, or leave it out")
    return value


def _fault(what: str, row: Row, hint: str) -> NoReturn:
    raise UserError(what, where=row.where, hint=hint)
