"""What a prompt is before any tokenizer has seen it, and everything derived from that content alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tidemill.core.buffers import pack_tokens
from tidemill.core.errors import UserError
from tidemill.core.protocols import Codec
from tidemill.core.records import Message, Prompt, Record


class Question(Record, kw_only=True):
    """What a model is asked (a plain text prompt is one user message) and where it came from."""

    messages: tuple[Message, ...]
    plain: bool = True  # False: only a chat template can render it
    where: str = ""  # for error messages: file and line

    @property
    def replies(self) -> tuple[str, ...]:
        """What goes with the question and makes two rows of one question different."""
        return ()


class Item(Question, kw_only=True):
    """One problem: a question and its answer."""

    answer: str
    metadata: dict[str, Any] = {}

    @property
    def replies(self) -> tuple[str, ...]:
        return (self.answer,)


QuestionT = TypeVar("QuestionT", bound=Question)


def text_item(text: str, answer: str, **fields: Any) -> Item:
    """An item whose prompt is one plain text."""
    return Item(messages=(Message(role="user", content=text),), answer=answer, **fields)


def hash_number(*parts: object) -> int:
    """A 64-bit number from the `repr` of its parts, the same on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def hash_share(*parts: object) -> float:
    """A number in [0, 1) from the `repr` of its parts."""
    return (hash_number(*parts) >> 11) / 2**53


def content_id(question: Question) -> str:
    """Names a question by its messages and what goes with it, in 32 hex digits."""
    messages = [[message.role, message.content] for message in question.messages]
    return hashlib.blake2b(json.dumps([messages, *question.replies]).encode(), digest_size=16).hexdigest()


def content_digest(*parts: Sequence[Question]) -> str:
    """One name for several sets of items; the order within a set does not matter."""
    return hashlib.blake2b(repr([sorted(map(content_id, part)) for part in parts]).encode(), digest_size=16).hexdigest()


def question_key(item: Question) -> str:
    """What makes two items the same question: all messages, answers left out, white space collapsed."""
    return json.dumps([[message.role, " ".join(message.content.split())] for message in item.messages])


def distinct(items: Iterable[QuestionT]) -> list[QuestionT]:
    """The first item of each content id, in order."""
    kept: dict[str, QuestionT] = {}
    for item in items:
        kept.setdefault(content_id(item), item)
    return list(kept.values())


def split_by_content(items: Sequence[QuestionT], held_out_fraction: float) -> tuple[list[QuestionT], list[QuestionT]]:
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


def in_content_order(items: Iterable[QuestionT]) -> list[QuestionT]:
    """Shuffled by content hash, so that any first n are a fair and always the same selection."""
    return sorted(items, key=lambda item: hash_number("order", content_id(item)))


def in_chat(question: Question, *, chat_template: bool) -> bool:
    """Whether the chat template renders it: because the configuration says so, or because nothing else can."""
    return chat_template or not question.plain


def encode_question(question: Question, codec: Codec, *, chat_template: bool) -> tuple[str, list[int]]:
    """Text and token ids as the model sees them: in the chat template, or plain with a blank line between messages.

    Raises:
        UserError: the codec refuses the text.
    """
    try:
        if in_chat(question, chat_template=chat_template):
            return codec.encode_chat(question.messages)
        text = "\n\n".join(message.content for message in question.messages)
        return text, codec.encode(text)
    except UserError as error:
        raise placed(error, question) from error


def placed(error: UserError, question: Question) -> UserError:
    """The codec knows what is wrong with a text; only here is known where the text is from."""
    return UserError(error.what, where=question.where or error.where, cure=error.cure)


def renderer(codec: Codec, *, chat_template: bool) -> Callable[[Item], Prompt]:
    """How an item becomes a prompt."""

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
