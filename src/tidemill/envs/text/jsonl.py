"""Prompts and answers from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tidemill.config.task import JsonlTask
from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.envs.text.content import Item, content_digest, distinct, in_content_order, question_key, split_by_content
from tidemill.envs.text.prompts import ListedSource, Render
from tidemill.envs.text.task import Task, longest_of

CONTENT_KEYS = frozenset({"prompt", "messages", "answer"})
SHAPE = (
    'a line looks like {"prompt": "2+2=", "answer": "4"} or {"messages": [{"role": "user", "content": …}], "answer": …}'
)


def build_jsonl(config: JsonlTask, *, batch_prompts: int, seed: int, render: Render) -> Task:
    """The task of one file, or of a training and an evaluation file.

    A line repeated is taken once. A question in both files, or in one file with several answers, is on one side only.

    Raises:
        UserError: naming file and line, when a file cannot be read or has too little in it.
    """
    listed = list(read_items(config.path))
    items = distinct(listed)
    repeated = len(listed) - len(items)
    shared = 0
    if config.held_out_path is None:
        train, held_out = split_by_content(items, config.held_out_fraction)
        if not held_out:
            raise UserError(
                "one question alone cannot be split into training and evaluation",
                where=str(config.path),
                cure="add lines, or give task.held_out_path",
            )
    else:
        held_out = distinct(read_items(config.held_out_path))
        asked = {question_key(item) for item in held_out}
        train = [item for item in items if question_key(item) not in asked]
        shared = len(items) - len(train)
        if not train:
            raise UserError(
                "every question is also an evaluation question, so none is left to train on",
                where=str(config.path),
                cure=f"take the shared lines out of {config.held_out_path}",
            )
    left_out = [f"{repeated} repeated"] * bool(repeated) + [f"{shared} kept for evaluation"] * bool(shared)
    return Task(
        source=ListedSource(train, in_content_order(held_out), batch_prompts=batch_prompts, seed=seed, render=render),
        default_stop_strings=(),
        check=None,
        train_size=len(train),
        held_out_size=len(held_out),
        longest=longest_of([*train, *held_out], render),
        digest=content_digest(train, held_out),
        description=f"{config.path.name}" + (f" (left out of training: {', '.join(left_out)})" if left_out else ""),
    )


def read_items(path: Path) -> Iterator[Item]:
    """The items of a JSONL file, blank lines skipped.

    Raises:
        UserError: naming file and line number of the first line that is not an item, or a file that cannot be read.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(
            f"cannot read the prompts: {error.strerror or error}",
            where=str(path),
            cure="check task.path and task.held_out_path",
        ) from error
    if not any(line.strip() for line in lines):
        raise UserError("the file has no lines", where=str(path), cure=SHAPE)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _item(line, f"{path}, line {number}")


def _item(line: bytes, where: str) -> Item:
    try:
        fields = json.loads(line.decode(), parse_constant=_refuse_constant)
        json.dumps(fields, ensure_ascii=False).encode()  # an escaped half of a character pair cannot be encoded
    except UnicodeError as error:
        raise UserError("not valid UTF-8 text", where=where, cure="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        fault = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"broken JSON: {fault}", where=where, cure="one JSON object per line; " + SHAPE) from error
    if not isinstance(fields, dict):
        _fault(f"expected a JSON object, found {type(fields).__name__}", where)
    if ("prompt" in fields) == ("messages" in fields):
        _fault("expected either `prompt` or `messages`", where)
    return Item(
        messages=_messages(fields, where),
        answer=_answer(fields, where),
        plain="prompt" in fields,
        metadata={key: value for key, value in fields.items() if key not in CONTENT_KEYS},
        where=where,
    )


def _messages(fields: dict[str, Any], where: str) -> tuple[Message, ...]:
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str) or not fields["prompt"].strip():
            _fault("`prompt` must be a text that is not empty", where)
        return (Message(role="user", content=fields["prompt"]),)
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        _fault("`messages` must be a list that is not empty", where)
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            _fault("each of `messages` must have `role` and `content` and nothing else", where)
        if not all(isinstance(value, str) and value for value in message.values()):
            _fault("`role` and `content` of a message must be texts that are not empty", where)
    return tuple(Message(**message) for message in messages)


def _answer(fields: dict[str, Any], where: str) -> str:
    answer = fields.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        _fault('`answer` must be there, a text or a number ("" where no reward needs it)', where)
    return str(answer)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _fault(what: str, where: str) -> NoReturn:
    raise UserError(what, where=where, cure=SHAPE)
