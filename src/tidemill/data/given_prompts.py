"""Prompts that a user gives to `generate`: texts and conversations, as objects, on the command line or in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.data.prompts import RawPrompt, chat_message
from tidemill.data.rows import ASSISTANT, CONVERSATIONS, SHAREGPT_CURE

SHAPE = 'give a text, or messages such as [{"role": "user", "content": "2+2="}]'


def questions(given: Any) -> list[RawPrompt]:
    """One question per prompt, from a text, a conversation, a row, or several of these.

    A conversation is a list of messages, as for OpenAI's API; a row has `prompt` (either kind) or `messages`.

    Raises:
        UserError: names the prompt that is neither.
    """
    if isinstance(given, str) or _is_conversation(given) or isinstance(given, Mapping):
        return [_question(given, "prompts")]
    if not isinstance(given, Iterable):
        raise UserError(f"expected text or messages, found {given!r:.40}", where="prompts", hint=SHAPE)
    found = [_question(each, f"prompts[{number}]") for number, each in enumerate(given)]
    if not found:
        raise UserError("no prompt given", where="prompts", hint=SHAPE)
    return found


def read_question_file(path: Path) -> list[Any]:
    """The prompts in a file: JSON lines (a text, conversation or row each), JSON (one of them or a list), or one text.

    Raises:
        UserError: the file cannot be read, or is not what its name says.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot be read: {reason}", where=str(path), hint="name a file with prompts") from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", where=str(path), hint="save it as UTF-8") from None
    if path.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        return [_json(line, f"{path}:{number}") for number, line in lines]
    if path.suffix == ".json":
        found = _json(text, str(path))
        return found if isinstance(found, list) and not _is_conversation(found) else [found]
    return [text.removesuffix("\n")]


def as_written(text: str) -> list[Any]:
    """The prompts in a text: itself, or the conversations that it is, in JSON or JSON lines."""
    for parts in ([text], [line for line in text.splitlines() if line.strip()]):
        try:
            found = [json.loads(part) for part in parts]
        except ValueError:
            continue
        array = found[0] if len(found) == 1 and isinstance(found[0], list) else []
        for listed in (found, array):
            if listed and all(_is_conversation(each) or _is_row(each) for each in listed):
                return listed
    return [text]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"not valid JSON: {error}", where=where, hint=f"as JSON, {SHAPE}") from None


def _is_conversation(given: Any) -> bool:
    """Whether it is meant as a list of messages; `_message` checks each."""
    listed = isinstance(given, (list, tuple)) and bool(given)
    return listed and all(isinstance(each, Message) or (isinstance(each, Mapping) and "role" in each) for each in given)


def _is_row(given: Any) -> bool:
    return isinstance(given, Mapping) and ("messages" in given or "prompt" in given)


def _question(given: Any, where: str) -> RawPrompt:
    if isinstance(given, str):
        return RawPrompt(messages=(Message(role="user", content=given),), where=where)
    if isinstance(given, Mapping) and _is_row(given):
        field = "messages" if given.get("messages") is not None else "prompt"
        return _question(given[field], f"{where}, {field}")
    if isinstance(given, Mapping) and "role" in given:
        hint = "put the message into a list: one list per prompt"
        raise UserError("one message is not a conversation", where=where, hint=hint)
    if not _is_conversation(given):
        sharegpt = isinstance(given, Mapping) and not {"from", *CONVERSATIONS}.isdisjoint(given)
        hint = SHAREGPT_CURE if sharegpt else SHAPE
        raise UserError(f"expected text or messages, found {given!r:.40}", where=where, hint=hint)
    messages = tuple(_message(each, f"{where}[{number}]") for number, each in enumerate(given))
    if messages[-1].role == ASSISTANT:
        hint = "end with a message of the user; the model writes the assistant's"
        raise UserError("the last message is the assistant's", where=where, hint=hint)
    return RawPrompt(messages=messages, plain=False, where=where)


def _message(given: Message | Mapping[str, Any], where: str) -> Message:
    if isinstance(given, Message):
        return chat_message(given.role, given.content, field="messages", where=where)
    fields = {name: value for name, value in given.items() if value is not None}
    if more := [name for name in fields if name not in ("role", "content")]:
        hint = "a message has role and content"
        raise UserError(f"the message has a field {more[0]!r}", where=where, hint=hint)
    role, content = fields.get("role"), fields.get("content")
    parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else []  # of OpenAI's API, of type text
    if parts and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise UserError("the message's content is not a text", where=where, hint=SHAPE)
    if not isinstance(role, str) or not role:
        raise UserError("the message's role is not a text", where=where, hint=SHAPE)
    return chat_message(role, content, field="messages", where=where)
