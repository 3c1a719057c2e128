"""Reads and writes rows of data files: prompts with answers, demonstrations and preference pairs."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tidemill.core.errors import UserError
from tidemill.core.records import Message, Prompt, Record
from tidemill.envs.text.prompts import Item, Question

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CURE = "one JSON object per line, as UTF-8"


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line number, value) of every non-blank line; blank lines count too, from 1.

    Raises:
        UserError: a line is not JSON; names file and line.
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).rstrip(b"\r\n")
            if text.strip():
                where = f"{path}, line {number}"
                yield where, _parsed(text, where)


def _parsed(line: bytes, where: str) -> Any:
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates
    except UnicodeError as error:
        raise UserError("not valid UTF-8 text", where=where, hint="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        fault = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"broken JSON: {fault}", where=where, hint=CURE) from error
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def import_extra(module: str, *, package: str, needed_by: str, extra: str = "tasks") -> Any:
    """Import a module of an optional package.

    Args:
        extra: the extra of Tidemill that installs it.

    Raises:
        UserError: it is not installed; with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{needed_by} needs the package {package} ({error})", hint=f'pip install "tidemill[{extra}]"'
        ) from error


BATCH_ROWS = 1024
"""Rows decoded at a time."""


def read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, fields) of every row, counted from 0 as tables do.

    Raises:
        UserError: pyarrow is not installed, or the file is not a valid Parquet file.
        OSError: the file cannot be read.
    """
    arrow = import_extra("pyarrow", package="pyarrow", needed_by="reading Parquet", extra="data")
    parquet = import_extra("pyarrow.parquet", package="pyarrow", needed_by="reading Parquet", extra="data")
    number = 0
    try:
        with path.open("rb") as stream, parquet.ParquetFile(stream) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for row in batch.to_pylist():
                    yield f"{path}, row {number} (from 0)", row
                    number += 1
    except arrow.ArrowException as error:
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise UserError(
            f"not a readable Parquet file: {reason}",
            where=str(path),
            hint="write it again, or rename a file of JSON lines to .jsonl",
        ) from error


STATE = "state.json"


def read_saved(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, fields) of every row of a folder written by `save_to_disk`, counted from 0. Downloads nothing.

    Raises:
        UserError: `datasets` is not installed, or the folder is not a saved data set, holds several splits or is
            damaged.
    """
    if not (path / STATE).is_file():
        raise _no_data_set(path)
    datasets = import_extra("datasets", package="datasets", needed_by="reading a saved data set", extra="data")
    try:
        # As Arrow tables, because the default format decodes images and audio.
        saved = datasets.load_from_disk(str(path)).with_format("arrow")
    except Exception as error:  # a damaged file can raise anything
        raise UserError(
            f"the saved data set cannot be loaded: {type(error).__name__}: {error}",
            where=str(path),
            hint="save it again with save_to_disk; it needs at least one row",
        ) from error
    number = 0
    for table in saved.iter(batch_size=BATCH_ROWS):
        for row in table.to_pylist():
            yield f"{path}, row {number} (from 0)", row
            number += 1


def _no_data_set(path: Path) -> UserError:
    if splits := sorted(each.name for each in path.iterdir() if (each / STATE).is_file()):
        named = " or ".join(str(path / split) for split in splits)
        return UserError(f"holds several splits: {', '.join(splits)}", where=str(path), hint=f"give one: {named}")
    files = sorted(each.name for each in path.iterdir() if each.suffix in (".parquet", ".jsonl", ".json"))
    hint = f"give one of its files, {files[0]}" if files else "give a file, or a folder written by save_to_disk"
    return UserError("is not a folder that `datasets` saved (it has no state.json)", where=str(path), hint=hint)


class Row(Record):
    """One row."""

    fields: dict[str, Any]
    where: str  # "file, line 3", or for tables "file, row 2 (from 0)"

    def get(self, name: str) -> Any:
        """A field's value; None if it is missing, null or NaN (tables have every column in every row)."""
        value = self.fields.get(name)
        return None if isinstance(value, float) and math.isnan(value) else value


Rows = Callable[[Path], Iterator[tuple[str, Any]]]
"""(where, JSON value) of every row; raises UserError at a row that cannot be read."""

READERS: dict[str, Rows] = {"jsonl": read_json_lines, "parquet": read_parquet, "datasets": read_saved}


def read_rows(path: Path, *, section: str, shape: str) -> Iterator[Row]:
    """The rows of a file or folder, one at a time.

    Args:
        section: of the configuration that names the file: "task" or "data".
        shape: an example of a row, for the hints.

    Raises:
        UserError: it cannot be read, is empty, or has a row that is not an object; names file and row.
    """
    if not path.exists():
        keys = f"check {section}.path and {section}.held_out_path"
        raise UserError("cannot read the data: No such file or folder", where=str(path), hint=keys)
    read = READERS[detected_format(path)]
    empty = True
    try:
        for where, value in read(path):
            if not isinstance(value, dict):
                raise UserError(f"expected a JSON object, found {type(value).__name__}", where=where, hint=shape)
            empty = False
            yield Row(fields=value, where=where)
    except OSError as error:
        what = f"cannot read the data: {error.strerror or error}"
        raise UserError(what, where=str(path), hint=f"check {section}.path, {section}.held_out_path") from error
    if empty:
        raise UserError("the file has no rows", where=str(path), hint=shape)


def detected_format(path: Path) -> str:
    """The format that the path suggests."""
    if path.is_dir():
        return "datasets"
    return "parquet" if path.suffix.lower() == ".parquet" else "jsonl"


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
CONTENT_FIELDS = frozenset({"prompt", "messages", "answer", "tools"})
TOOLS_SHAPE = 'a tool looks like {"type": "function", "function": {"name": …, "parameters": {…}}}'


class DemonstrationText(Question, kw_only=True):
    """A demonstration before tokenization."""

    completion: str

    @property
    def replies(self) -> tuple[str, ...]:
        return (self.completion,)


class PairText(Question, kw_only=True):
    """A preference pair before tokenization. Two rows that differ only in the margin are the same pair."""

    chosen: str
    rejected: str
    margin: float = 0.0

    @property
    def replies(self) -> tuple[str, ...]:
        return (self.chosen, self.rejected)


def read_items(path: Path, *, columns: Mapping[str, str] | None = None, system_prompt: str = "") -> Iterator[Item]:
    """Prompts with their answers; all other fields are metadata.

    Args:
        columns: names of the file's columns for `prompt`, `messages`, `answer` and `tools`.
        system_prompt: put before every question.

    Raises:
        UserError: a row is invalid; names file, row and field.
    """
    for row in read_rows(path, section="task", shape=PROMPT_SHAPE):
        yield to_item(row, columns=columns or {}, system_prompt=system_prompt)


def to_item(row: Row, *, columns: Mapping[str, str], system_prompt: str) -> Item:
    """The prompt and the answer of one row; arguments and errors as `read_items`."""
    row = _renamed(row, columns)
    messages, plain = _messages(row, PROMPT_SHAPE), isinstance(row.get("prompt"), str)
    if system_prompt:
        messages = (Message(role="system", content=system_prompt), *messages)
    tools = _tools(row)
    return Item(
        messages=messages,
        answer=_answer(row),
        plain=plain and not tools,
        tools=tools,
        metadata={name: _metadata(row, name) for name in row.fields if name not in CONTENT_FIELDS},
        where=row.where,
    )


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with its columns under their standard names."""
    missing = [column for column in columns.values() if column not in row.fields]
    if missing:
        hint = f"the row has {', '.join(row.fields)}; correct task.columns"
        raise UserError(f"the row has no column `{missing[0]}`", where=row.where, hint=hint)
    rest = {name: value for name, value in row.fields.items() if name not in columns.values()}
    return Row(fields={**rest, **{name: row.fields[column] for name, column in columns.items()}}, where=row.where)


def _tools(row: Row) -> tuple[dict[str, Any], ...]:
    tools = row.get("tools")
    if tools is None:
        return ()
    if isinstance(tools, str):  # tables often hold them as JSON
        try:
            tools = json.loads(tools)
        except ValueError:
            _fault("`tools` is a text that is not JSON", row, TOOLS_SHAPE)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _fault("`tools` must be a list of tables", row, TOOLS_SHAPE)
    _metadata(row, "tools")
    return tuple(tools)


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
                _fault("`messages` holds only the assistant's turn", row, DEMONSTRATION_SHAPE)
            messages, completion = tuple(asked), last.content
        yield DemonstrationText(
            messages=messages,
            completion=_reply(completion, "completion", row, DEMONSTRATION_SHAPE),
            plain=isinstance(row.get("prompt"), str),
            where=row.where,
        )


def read_pairs(path: Path) -> Iterator[PairText]:
    """Prompts with a better and a worse completion.

    Raises:
        UserError: as `read_items`; also if both sides have the same text.
    """
    for row in read_rows(path, section="data", shape=PAIR_SHAPE):
        pair = PairText(
            messages=_messages(row, PAIR_SHAPE),
            chosen=_reply(row.get("chosen"), "chosen", row, PAIR_SHAPE),
            rejected=_reply(row.get("rejected"), "rejected", row, PAIR_SHAPE),
            margin=_margin(row),
            plain=isinstance(row.get("prompt"), str),
            where=row.where,
        )
        if pair.chosen == pair.rejected:
            raise identical_replies(pair)
        yield pair


def identical_replies(pair: PairText) -> UserError:
    """The error for a pair with two equal sides."""
    return UserError(
        f"`chosen` and `rejected` are the same, {pair.chosen[:40]!r}",
        where=pair.where,
        hint="remove the row",
    )


def _messages(row: Row, shape: str) -> tuple[Message, ...]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        there = ", ".join(f"`{name}`" for name in row.fields if row.get(name) is not None) or "nothing"
        _fault(f"expected either `prompt` or `messages`, found {there}", row, shape)
    field, listed = ("messages", messages) if prompt is None else ("prompt", prompt)
    if field == "prompt" and not isinstance(prompt, list):
        if not isinstance(prompt, str) or not prompt.strip():
            _fault("`prompt` must be a non-empty text, or a list of messages", row, shape)
        return (Message(role="user", content=prompt),)
    if not isinstance(listed, list) or not listed:
        _fault(f"`{field}` must be a non-empty list", row, shape)
    return tuple(_message(message, field, row, shape) for message in listed)


def _message(message: Any, field: str, row: Row, shape: str) -> Message:
    # A table gives every message all fields that any message has, with null values.
    given = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if set(given) != {"role", "content"}:
        _fault(f"each of `{field}` must have exactly the fields `role` and `content`", row, shape)
    if not all(isinstance(value, str) and value for value in given.values()):
        _fault(f"`role` and `content` of `{field}` must be non-empty texts", row, shape)
    return Message(**given)


def _answer(row: Row) -> str:
    answer = row.get("answer")
    if answer is None:
        return ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        _fault("`answer` must be a text or a number", row, PROMPT_SHAPE)
    return str(answer)


def _reply(value: Any, field: str, row: Row, shape: str) -> str:
    """A completion: its text, or a list with one assistant message."""
    if isinstance(value, list):
        messages = [_message(message, field, row, shape) for message in value]
        if len(messages) != 1 or messages[0].role != ASSISTANT:
            _fault(f"`{field}` must be a text, or one message with the role {ASSISTANT}", row, shape)
        value = messages[0].content
    if value is None:
        _fault(f"the row has no `{field}`", row, shape)
    if not isinstance(value, str):
        _fault(f"`{field}` must be a text, found {type(value).__name__}", row, shape)
    if not value.strip():
        _fault(f"`{field}` is empty", row, "remove the row, or add the completion")
    return value


def _margin(row: Row) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin) or margin < 0:
        _fault(f"`margin` must be a non-negative number, found {margin!r:.40}", row, PAIR_SHAPE)
    return float(margin)


def _metadata(row: Row, name: str) -> Any:
    value = row.get(name)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        found = type(value).__name__
        _fault(
            f"`{name}` holds a {found}, which JSON cannot represent", row, "convert that column to text, or remove it"
        )
    return value


def _fault(what: str, row: Row, hint: str) -> NoReturn:
    raise UserError(what, where=row.where, hint=hint)


RowFields = dict[str, Any]


class ScoredCompletion(NamedTuple):
    """One completion of a prompt, identified by its position among the prompt's samples."""

    text: str
    right: bool
    ended: bool  # by the model, not by the token limit


def demonstration_row(prompt: Prompt, *, ending: str) -> RowFields:
    """The prompt with its answer as the completion.

    Args:
        ending: appended to the answer: a stop string or nothing.

    Raises:
        UserError: the prompt has no answer.
    """
    if not prompt.answer.strip():
        raise UserError(f"the prompt {prompt.text[:40]!r} has no answer", where="task", hint="use a task with answers")
    return {**question_row(prompt), "completion": prompt.answer + ending}


def pair_rows(prompt: Prompt, samples: Sequence[ScoredCompletion], *, most: int) -> list[RowFields]:
    """Up to `most` pairs of one prompt: each different incorrect completion once, paired with the different correct
    ones in turn.

    A correct completion must have been ended by the model; an incorrect one may have been truncated. Empty completions
    are skipped.
    """
    right = list(_different(samples, right=True))
    wrong = list(_different(samples, right=False))[:most]
    if not right:
        return []
    return [
        {
            **question_row(prompt),
            "chosen": samples[right[at % len(right)]].text,
            "rejected": samples[index].text,
            "chosen_sample": right[at % len(right)],
            "rejected_sample": index,
            "prompt_id": prompt.prompt_id,
        }
        for at, index in enumerate(wrong)
    ]


def question_row(prompt: Prompt) -> RowFields:
    """The prompt's fields; when read again, they give the same tokens."""
    if prompt.messages:
        return {"messages": [{"role": message.role, "content": message.content} for message in prompt.messages]}
    return {"prompt": prompt.text}


def _different(samples: Sequence[ScoredCompletion], *, right: bool) -> Iterator[int]:
    """Indices of the first sample with each text."""
    seen = set[str]()
    for index, sample in enumerate(samples):
        usable = sample.right is right and (sample.ended or not right) and sample.text.strip()
        if usable and sample.text not in seen:
            seen.add(sample.text)
            yield index
