"""Prompts, their reproducible order, and the task record."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import UserError
from tidemill.core.protocols import Codec, PromptSource
from tidemill.core.records import Message, Prompt, Record, count, pack_tokens


class RawPrompt(Record, kw_only=True):
    """The messages for a model (a plain text prompt is one user message) and their origin."""

    messages: tuple[Message, ...]
    plain: bool = True  # False: only a chat template can render it
    tools: tuple[dict[str, Any], ...] = ()  # passed to the chat template
    where: str = ""  # for error messages: file and line

    @property
    def replies(self) -> tuple[str, ...]:
        """The texts stored with the question that distinguish two rows with the same question."""
        return ()


class Item(RawPrompt, kw_only=True):
    """One problem: a question and its answer."""

    answer: str | None  # None: the row has none
    metadata: dict[str, Any] = {}

    @property
    def replies(self) -> tuple[str, ...]:
        return (self.answer or "",)


QuestionT = TypeVar("QuestionT", bound=RawPrompt)
ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
} | {role: role for role in ROLES}
"""Names of roles in other formats, in lower case."""


def chat_message(role: str, content: str, *, field: str, where: str) -> Message:
    """A message with a role that chat templates know; "developer" is OpenAI's newer name for "system".

    Args:
        field: that holds the messages, for the error.

    Raises:
        UserError: the role is another one. A template may skip such a message without an error.
    """
    if role == "developer":
        role = "system"
    if role not in ROLES:
        known = f"the roles are {', '.join(ROLES[:-1])} and {ROLES[-1]}"
        meant = OTHER_ROLES.get(role.strip().lower())
        hint = f'write "{meant}" in place of "{role}"; {known}' if meant else known
        raise UserError(f"`{field}` has a message with the role {role!r:.40}", where=where, hint=hint)
    return Message(role=role, content=content)


def after_system(messages: tuple[Message, ...], system_prompt: str) -> tuple[Message, ...]:
    """The messages after a configured system prompt, which their own system message replaces."""
    if not system_prompt or messages[0].role == "system":
        return messages
    return (Message(role="system", content=system_prompt), *messages)


def text_item(text: str, answer: str, **fields: Any) -> Item:
    """An item whose prompt is one plain text."""
    return Item(messages=(Message(role="user", content=text),), answer=answer, **fields)


def hash_number(*parts: object) -> int:
    """A 64-bit number from the `repr` of its parts, equal on every machine and Python version."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def hash_share(*parts: object) -> float:
    """A number in [0, 1) from the `repr` of its parts."""
    return (hash_number(*parts) >> 11) / 2**53


def content_id(question: RawPrompt) -> str:
    """32 hex digits from a question's messages, tools and replies."""
    messages = [[message.role, message.content] for message in question.messages]
    tools = [list(question.tools)] if question.tools else []
    return hashlib.blake2b(json.dumps([messages, *tools, *question.replies]).encode(), digest_size=16).hexdigest()


def content_digest(*parts: Sequence[RawPrompt]) -> str:
    """One digest for several sets of items; the order within a set does not matter."""
    return ids_digest(*[[content_id(item) for item in part] for part in parts])


def ids_digest(*parts: Iterable[str]) -> str:
    """The `content_digest` of items with these content ids."""
    digest = hashlib.blake2b(digest_size=16)
    for number, part in enumerate(parts):
        digest.update(b"], [" if number else b"[[")
        for place, name in enumerate(sorted(part)):
            digest.update(f"{', ' if place else ''}{name!r}".encode())
    digest.update(b"]]" if parts else b"[]")
    return digest.hexdigest()


def question_key(item: RawPrompt) -> str:
    """Equal for items with the same question: all messages without answers, white space collapsed."""
    return json.dumps([[message.role, " ".join(message.content.split())] for message in item.messages])


def question_number(item: RawPrompt) -> int:
    """64 bits, equal for items with the same question. They decide whether a question is held out."""
    return hash_number("held out", question_key(item))


def in_content_order(items: Iterable[QuestionT]) -> list[QuestionT]:
    """Shuffled by content hash, so that the first n are always the same random sample."""
    return sorted(items, key=lambda item: hash_number("order", content_id(item)))


def in_chat(question: RawPrompt, *, chat_template: bool) -> bool:
    """Whether the chat template renders it, either because the configuration says so or because it is not plain."""
    return chat_template or not question.plain


def encode_question(question: RawPrompt, codec: Codec, *, chat_template: bool) -> tuple[str, list[int]]:
    """Text and token ids as the model sees them: in the chat template, or plain with a blank line between messages.

    Raises:
        UserError: the codec rejects the text.
    """
    try:
        if in_chat(question, chat_template=chat_template):
            return codec.encode_chat(question.messages, tools=question.tools)
        text = "\n\n".join(message.content for message in question.messages)
        return text, codec.encode(text)
    except UserError as error:
        raise with_location(error, question) from error


def with_location(error: UserError, question: RawPrompt) -> UserError:
    """The error with the location of the question's text, which the codec does not know."""
    return UserError(error.what, where=question.where or error.where, hint=error.hint)


def renderer(codec: Codec, *, chat_template: bool) -> Callable[[Item], Prompt]:
    """Returns the function that makes a prompt from an item."""

    def render(item: Item) -> Prompt:
        text, token_ids = encode_question(item, codec, chat_template=chat_template)
        return Prompt(
            prompt_id=content_id(item),
            token_ids=pack_tokens(token_ids),
            text=text,
            answer=item.answer,
            metadata=item.metadata,
            messages=item.messages if in_chat(item, chat_template=chat_template) else (),
        )

    return render


class EpochOrder:
    """The examples of each step: step s has the positions [(s-1)·B, s·B), and position p is in epoch p // N.

    Every epoch is a permutation of all N examples that depends only on seed, epoch and ids, not on the order in
    which they are listed. With N ≥ 2B no batch holds an example twice, even if it spans two epochs; in a smaller
    set it may, from different epochs.

    Args:
        ids: the examples' names, all different.
        batch: B, examples per step.
        aligned: False if up to B examples are taken from any position, and not B from a multiple of B.
    """

    def __init__(self, ids: Sequence[str], *, batch: int, seed: int, aligned: bool = True) -> None:
        self._ids, self._batch, self._seed, self._aligned = ids, batch, seed, aligned
        self._drawn = lru_cache(maxsize=3)(self._draw)
        self._order = lru_cache(maxsize=2)(self._without_straddling_repeats)

    def batch(self, step: int) -> list[tuple[int, int]]:
        """The (epoch, index into `ids`) pairs of 1-based `step`."""
        first = (step - 1) * self._batch
        return [self.at(position) for position in range(first, first + self._batch)]

    def at(self, position: int) -> tuple[int, int]:
        """The (epoch, index into `ids`) at a position of the endless sequence."""
        epoch, place = divmod(position, len(self._ids))
        return epoch, int(self._order(epoch)[place])

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        keys = (hash_number("epoch", self._seed, epoch, name) for name in self._ids)
        return np.argsort(np.fromiter(keys, np.uint64, len(self._ids)), kind="stable")

    def _without_straddling_repeats(self, epoch: int) -> NDArray[np.int64]:
        drawn = self._drawn(epoch)
        carried = (epoch * len(self._ids)) % self._batch if self._aligned else self._batch - 1
        if not epoch or not carried or len(drawn) < 2 * self._batch:
            return drawn
        # The last B positions are never moved, so that the next epoch can read them without computing this reordering.
        movable, fixed = drawn[: -self._batch], drawn[-self._batch :]
        just_seen = np.isin(movable, self._drawn(epoch - 1)[-carried:])
        return np.concatenate([movable[~just_seen], movable[just_seen], fixed])


Render = Callable[[Item], Prompt]


class Order(Protocol):
    """The examples of each step."""

    def batch(self, step: int) -> list[tuple[int, int]]:
        """The (epoch, index) pairs of 1-based `step`."""


class _HeldOut:
    """The held-out prompts of both sources, in a fixed order, tokenized on first use."""

    def __init__(self, items: Sequence[Item], render: Render) -> None:
        self._items, self._render = items, render
        self._prompts: list[Prompt] = []

    def held_out(self, limit: int | None = None) -> Sequence[Prompt]:
        """The first `limit` prompts, or all."""
        wanted = len(self._items) if limit is None else min(limit, len(self._items))
        self._prompts += [self._render(self._items[at]) for at in range(len(self._prompts), wanted)]
        return self._prompts[:wanted]


class ListedSource(_HeldOut):
    """A finite training set.

    Args:
        order: of the training items; by default an `EpochOrder`.
    """

    def __init__(
        self,
        train: Sequence[Item],
        held_out: Sequence[Item],
        *,
        batch_prompts: int,
        seed: int,
        render: Render,
        order: Order | None = None,
    ) -> None:
        super().__init__(held_out, render)
        self.train_items = train
        self._order = order or EpochOrder([content_id(item) for item in train], batch=batch_prompts, seed=seed)

    def train_batch(self, step: int) -> list[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs of 1-based `step`, a pure function of seed, step and the training set."""
        return [(epoch, self.render(index)) for epoch, index in self._order.batch(step)]

    def render(self, index: int) -> Prompt:
        """The prompt of a training item."""
        return self._render(self.train_items[index])


class SampledSource(_HeldOut):
    """Training prompts drawn from a set too large to list: each step is its own epoch, without duplicates.

    Args:
        draw: returns the training item with number `n` of the stream `key`; a pure function.
    """

    def __init__(
        self,
        draw: Callable[[int, int], Item],
        held_out: Sequence[Item],
        *,
        batch_prompts: int,
        seed: int,
        render: Render,
    ) -> None:
        super().__init__(held_out, render)
        self._draw_item, self._batch, self._seed = draw, batch_prompts, seed

    def train_batch(self, step: int) -> list[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs of 1-based `step`, with epoch = step - 1; a pure function of seed and step."""
        key = hash_number("step", self._seed, step)
        items: dict[str, Item] = {}
        number = 0
        while len(items) < self._batch:
            item = self._draw_item(key, number)
            items.setdefault(content_id(item), item)
            number += 1
        return [(step - 1, self._render(item)) for item in items.values()]


ANSWER = "answer"


class RowFigures(Record):
    """The rows of one or several files, as they were read."""

    rows: int
    repeated: int  # equal to an earlier row in everything that a reward can see
    filled: dict[str, int]  # rows with a value in a column, by column; "answer" is always there

    @property
    def columns(self) -> tuple[str, ...]:
        """Names in the metadata of some rows."""
        return tuple(name for name in self.filled if name != ANSWER)

    def missing(self, column: str) -> int:
        """Rows in which a column is absent or null."""
        return self.rows - self.filled.get(column, 0)

    def mostly_missing(self, column: str) -> bool:
        return 2 * self.missing(column) > self.rows

    def plus(self, other: RowFigures) -> RowFigures:
        filled = Counter(self.filled)
        filled.update(other.filled)
        return RowFigures(rows=self.rows + other.rows, repeated=self.repeated + other.repeated, filled=filled)


def count_filled(filled: Counter[str], values: Mapping[str, Any]) -> None:
    """Count a row in `RowFigures.filled`."""
    for name, value in values.items():
        filled[name] += value is not None


def distinct(items: Iterable[QuestionT]) -> list[QuestionT]:
    """The first item with each content id."""
    found = dict[str, QuestionT]()
    for item in items:
        found.setdefault(content_id(item), item)
    return list(found.values())


def row_figures(items: Sequence[Item]) -> RowFigures:
    """The figures of items that are in memory."""
    filled = Counter[str]()
    for item in items:
        count_filled(filled, row_values(item))
    return RowFigures(rows=len(items), repeated=len(items) - len(distinct(items)), filled=filled)


def row_values(item: Item) -> dict[str, Any]:
    """The answer and the columns of an item; None where it has none."""
    return {ANSWER: item.answer, **item.metadata}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageCheck:
    """How a package scores completions, in a sandbox (`package_checks.py`); its scores are in [0, 1]."""

    package: str  # its import name, a row of CHECKS in `programs/check_answers.py`
    params: Mapping[str, Any] = field(default_factory=dict)  # arguments of that row; JSON
    entry: Callable[[Prompt], bytes]  # a pickle of what the package needs to know about a prompt
    answer: Callable[[str], str]  # the answer in a completion


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPrompt:
    """The longest prompt of a task: its tokens (or an upper bound), the start of its text, and its origin."""

    tokens: int
    text: str
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Prompts that are only evaluated."""

    prompts: Sequence[Prompt]
    rows: RowFigures
    digest: str  # of the content of the whole file

    @property
    def columns(self) -> tuple[str, ...]:
        """As `Task.columns`."""
        return self.rows.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompts in order, the task's own scorer, and the figures needed to plan a run."""

    source: PromptSource
    default_stop_strings: tuple[str, ...]
    check: PackageCheck | None  # the task's own scorer; None if completions are only compared with the answer
    train_size: int  # distinct training prompts; an estimate if they are drawn from a set too large to list
    held_out_size: int
    longest: LongestPrompt
    digest: str  # of the content of both sides; changes if the prompts change
    description: str
    train_rows: RowFigures | None = None  # None for prompts without rows
    held_out_rows: RowFigures | None = None  # the same figures if both sides are from the same rows
    left_out: Mapping[str, int] = field(default_factory=dict)  # rows that are not used, by reason
    eval_sets: Mapping[str, EvalSet] = field(default_factory=dict)  # by name

    @property
    def longest_prompt_tokens(self) -> int:
        return self.longest.tokens

    @property
    def columns(self) -> tuple[str, ...]:
        """Names in the metadata of some prompts."""
        sides = [side.columns for side in (self.train_rows, self.held_out_rows) if side]
        return tuple(dict.fromkeys(name for side in sides for name in side))

    @property
    def eval_prompts(self) -> dict[str, Sequence[Prompt]]:
        """The prompts of each evaluation set."""
        return {name: found.prompts for name, found in self.eval_sets.items()}


def longest_prompt(items: Iterable[Item], render: Callable[[Item], Prompt]) -> LongestPrompt:
    """Tokenizes every item once and returns the longest."""
    prompts = ((render(item), item.where) for item in items)
    longest, where = max(prompts, key=lambda pair: count(pair[0].token_ids))
    return LongestPrompt(tokens=count(longest.token_ids), text=longest.text, where=where)


def check_fits(task: Task, context_limit: int, max_new_tokens: int) -> None:
    """Check that every prompt of the task leaves room for its completion. All lengths in tokens.

    Raises:
        UserError: prompt and `max_new_tokens` together exceed `context_limit`; names the longest prompt.
    """
    longest, room = task.longest, context_limit - task.longest.tokens
    if max_new_tokens > room:
        start = longest.text[:60] + ("…" if len(longest.text) > 60 else "")
        raise UserError(
            f"the prompt starting {start!r} has {longest.tokens} tokens and with {max_new_tokens} new ones "
            f"does not fit the context of {context_limit}",
            where=longest.where,
            hint=(f"set sampling.max_new_tokens to at most {room}, or " if room > 0 else "")
            + "shorten the prompt, or use a model (or engine.context_tokens) with a longer context",
        )
