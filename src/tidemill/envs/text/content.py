"""What a prompt is before any tokenizer has seen it, and everything derived from that content alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tidemill.core.buffers import pack_tokens
from tidemill.core.protocols import Codec
from tidemill.core.records import Message, Prompt, Record


class Item(Record):
    """One problem: its messages (a plain text prompt is one user message), the answer and where it came from."""

    messages: tuple[Message, ...]
    answer: str
    plain: bool = True  # False: only a chat template can render it
    metadata: dict[str, Any] = {}
    where: str = ""  # for error messages: file and line


def text_item(text: str, answer: str, **fields: Any) -> Item:
    """An item whose prompt is one plain text."""
    return Item(messages=(Message(role="user", content=text),), answer=answer, **fields)


def hash_number(*parts: object) -> int:
    """A 64-bit number from the `repr` of its parts, the same on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def hash_share(*parts: object) -> float:
    """A number in [0, 1) from the `repr` of its parts."""
    return (hash_number(*parts) >> 11) / 2**53


def prompt_id(item: Item) -> str:
    """Names the item by its messages and answer, in 32 hex digits."""
    content = [[message.role, message.content] for message in item.messages]
    return hashlib.blake2b(json.dumps([content, item.answer]).encode(), digest_size=16).hexdigest()


def content_digest(*parts: Sequence[Item]) -> str:
    """One name for several sets of items; the order within a set does not matter."""
    return hashlib.blake2b(repr([sorted(map(prompt_id, part)) for part in parts]).encode(), digest_size=16).hexdigest()


def question_key(item: Item) -> str:
    """What makes two items the same question: all messages, answers left out, white space collapsed."""
    return json.dumps([[message.role, " ".join(message.content.split())] for message in item.messages])


def distinct(items: Iterable[Item]) -> list[Item]:
    """The first item of each prompt id, in order."""
    kept: dict[str, Item] = {}
    for item in items:
        kept.setdefault(prompt_id(item), item)
    return list(kept.values())


def split_by_content(items: Sequence[Item], held_out_fraction: float) -> tuple[list[Item], list[Item]]:
    """(training, held-out): each question's side depends on its content alone, and neither side is empty.

    With at least two different questions the side that would be empty gets the question nearest to the boundary.
    """
    share = {key: hash_share("held out", key) for key in {question_key(item) for item in items}}
    boundary = held_out_fraction
    if len(share) >= 2:
        ranked = sorted(share.values())
        boundary = min(max(boundary, ranked[1]), ranked[-1])
    train = [item for item in items if share[question_key(item)] >= boundary]
    held_out = [item for item in items if share[question_key(item)] < boundary]
    return train, held_out


def in_content_order(items: Iterable[Item]) -> list[Item]:
    """Shuffled by content hash, so that any first n are a fair and always the same selection."""
    return sorted(items, key=lambda item: hash_number("order", prompt_id(item)))


def renderer(codec: Codec, *, chat_template: bool) -> Callable[[Item], Prompt]:
    """How an item becomes a prompt: in the chat template, or as plain text with a blank line between messages."""

    def render(item: Item) -> Prompt:
        if chat_template or not item.plain:
            text, token_ids = codec.encode_chat(item.messages)
        else:
            text = "\n\n".join(message.content for message in item.messages)
            token_ids = codec.encode(text)
        return Prompt(
            prompt_id=prompt_id(item),
            token_ids=pack_tokens(token_ids),
            text=text,
            answer=item.answer,
            metadata=item.metadata,
        )

    return render
