"""The fields of rows: prompts with answers, demonstrations and preference pairs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, groupby
from typing import Any, NamedTuple, NoReturn, TypeAlias

from tidemill.core.errors import UserError
from tidemill.core.records import Message, Prompt
from tidemill.data.prompts import Item, RawPrompt, after_system, chat_message
from tidemill.data.row_files import DataRow

PROMPT_SHAPE = (
    'a row looks like {"prompt": "2+2=", "answer": "4"} or {"messages": [{"role": "user", "content": …}], "answer": …}'
)
DEMONSTRATION_SHAPE = (
    'a row looks like {"prompt": "2+2=", "completion": "4"}, or has "messages" (role and content each) instead of '
    '"prompt"; messages that end with the assistant\'s need no completion, and all turns of the assistant are learned; '
    '{"text": "2+2=4"} is learned whole'
)
PAIR_SHAPE = (
    'a row looks like {"prompt": "2+2=", "chosen": "4", "rejected": "5"}, or has "messages" (role and content each) '
    'instead of "prompt", or neither if "chosen" and "rejected" start with the same prompt; "margin" may be added'
)
CONVERSATIONS = ("conversations", "conversation")
"""Columns that hold the messages in other formats."""
SHAREGPT_CURE = (
    'rename `from` to role and `value` to content, with "user" for human and "assistant" for gpt: '
    '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}'
)
ASSISTANT = "assistant"
CONTENT_FIELDS = frozenset({"prompt", "messages", "answer", "tools"})
TOOLS_SHAPE = 'a tool looks like {"type": "function", "function": {"name": …, "parameters": {…}}}'


class RowItem(Item, kw_only=True):
    """A row of the user's data. Rows with equal questions and answers differ by their other columns."""

    @property
    def replies(self) -> tuple[str, ...]:
        columns = {name: value for name, value in self.metadata.items() if value is not None}
        if not columns:
            return super().replies
        # Read again before it is sorted: keys of nested tables may have several types.
        return (*super().replies, json.dumps(json.loads(json.dumps(columns)), sort_keys=True))


Reply: TypeAlias = str | tuple[Message, ...]
"""What follows a prompt: one text, or the messages from the first to the last of several turns of the assistant."""


class DemonstrationText(RawPrompt, kw_only=True):
    """A demonstration before tokenization."""

    completion: Reply  # empty: the text of the only message is learned whole

    @property
    def replies(self) -> tuple[str, ...]:
        return _texts(self.completion)


class PairText(RawPrompt, kw_only=True):
    """A preference pair before tokenization. Two rows that differ only in the margin are the same pair."""

    chosen: Reply
    rejected: Reply
    margin: float = 0.0

    @property
    def replies(self) -> tuple[str, ...]:
        return (*_texts(self.chosen), *_texts(self.rejected))


def _texts(reply: Reply) -> tuple[str, ...]:
    """The reply; of several turns, role and content of each message."""
    return (reply,) if isinstance(reply, str) else tuple(text for each in reply for text in (each.role, each.content))


def to_item(row: DataRow, *, columns: Mapping[str, str], system_prompt: str) -> Item:
    """The prompt of a row with its answer; all other fields are metadata.

    Args:
        columns: names of the row's columns for `prompt`, `messages`, `answer` and `tools`.
        system_prompt: put before the question, unless the row starts with a system message.

    Raises:
        UserError: the row is invalid; names file, row and field.
    """
    row = _renamed(row, columns, "task")
    rest, messages = _rest(row), _messages(row, PROMPT_SHAPE)
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        _fault("`answer` must be a text or a number", row, PROMPT_SHAPE)
    return RowItem(
        messages=after_system(messages, system_prompt),
        answer=None if answer is None else str(answer),
        metadata={name: _metadata(row, name) for name in row.fields if name not in CONTENT_FIELDS},
        **rest,
    )


def _rest(row: DataRow) -> dict[str, Any]:
    """The fields of a prompt besides its messages."""
    tools = _tools(row)
    return {"plain": isinstance(row.get("prompt"), str) and not tools, "tools": tools, "where": row.where}


def _renamed(row: DataRow, columns: Mapping[str, str], section: str) -> DataRow:
    """The row with its columns under their standard names."""
    if missing := [column for column in columns.values() if column not in row.fields]:
        hint = f"the row has {', '.join(row.fields)}; correct {section}.columns"
        _fault(f"the row has no column `{missing[0]}`", row, hint)
    rest = {name: value for name, value in row.fields.items() if name not in columns.values()}
    return DataRow(fields={**rest, **{name: row.fields[column] for name, column in columns.items()}}, where=row.where)


def _tools(row: DataRow) -> tuple[dict[str, Any], ...]:
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


def to_demonstration(row: DataRow, *, columns: Mapping[str, str], system_prompt: str) -> DemonstrationText:
    """The prompt of a row with the completion to learn; arguments and errors as `to_item`.

    Without a completion, the messages from the assistant's first turn on are the completion. Of a row that has only a
    `text`, all of it is learned.
    """
    row = _renamed(row, columns, "data")
    if row.get("label") is False:
        what = "`label` is false, which marks a completion as undesired (KTO), and this stage learns every completion"
        _fault(what, row, "remove the rows whose label is false")
    if all(row.get(name) is None for name in ("prompt", "messages", "completion")):
        if row.get("text") is not None:
            text = str(_reply(row.get("text"), "text", row, DEMONSTRATION_SHAPE))
            return DemonstrationText(messages=(Message(role="user", content=text),), completion="", where=row.where)
        if row.get("chosen") is not None:
            _refuse_pair(row)
    messages, completion = _messages(row, DEMONSTRATION_SHAPE), row.get("completion")
    if completion is None and row.get("prompt") is None and messages[-1].role == ASSISTANT:
        # A row starts with at least one message of its prompt.
        first = next((at for at in range(1, len(messages)) if messages[at].role == ASSISTANT), None)
        if first is None:
            _fault("`messages` holds only the assistant's turn", row, DEMONSTRATION_SHAPE)
        messages, completion = messages[:first], _turns(messages[first:], "messages", row, DEMONSTRATION_SHAPE)
    else:
        if completion is None and row.get("chosen") is not None:
            _refuse_pair(row)
        completion = _reply(completion, "completion", row, DEMONSTRATION_SHAPE)
    return DemonstrationText(messages=after_system(messages, system_prompt), completion=completion, **_rest(row))


def _refuse_pair(row: DataRow) -> NoReturn:
    chosen = row.get("chosen")
    name = "messages" if isinstance(chosen, list) and row.get("prompt") is None else "completion"
    _fault(
        "the row is a preference pair (`chosen`, `rejected`), and this stage learns from completions",
        row,
        f'give pairs to dpo or reward_model, or learn one side of them: columns = {{ {name} = "chosen" }}',
    )


def to_pair(row: DataRow, *, columns: Mapping[str, str], system_prompt: str) -> PairText:
    """The prompt of a row with a better and a worse completion. The prompt may be the common start of both.

    Raises:
        UserError: as `to_item`; also if both sides have the same text.
    """
    row = _with_prompt(_renamed(row, columns, "data"))
    rest, messages = _rest(row), _messages(row, PAIR_SHAPE)
    chosen = _reply(row.get("chosen"), "chosen", row, PAIR_SHAPE)
    rejected = _reply(row.get("rejected"), "rejected", row, PAIR_SHAPE)
    margin = 0.0 if row.get("margin") is None else row.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin) or margin < 0:
        _fault(f"`margin` must be a non-negative number, found {margin!r:.40}", row, PAIR_SHAPE)
    pair = PairText(
        messages=after_system(messages, system_prompt), chosen=chosen, rejected=rejected, margin=float(margin), **rest
    )
    if pair.chosen == pair.rejected:
        raise identical_replies(pair)
    return pair


def _with_prompt(row: DataRow) -> DataRow:
    """The row with the prompt that both sides contain in its own field. (TRL calls such a prompt implicit.)"""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    for side in ("chosen", "rejected"):
        if row.get(side) is None and row.get("completion") is not None:
            what = f"the row has a `completion` and no `{side}`, and this stage learns from preference pairs"
            labelled = isinstance(row.get("label"), bool)  # as for KTO
            cure = "give those whose label is true to sft, or pair them" if labelled else "give completions to sft"
            _fault(what, row, f"{cure}; {PAIR_SHAPE}")
    if row.get("messages") is not None:
        return row
    if isinstance(chosen, str) and isinstance(rejected, str) and row.get("prompt") is None:
        size = _common_size(chosen, rejected)
        # Up to the white space before the word in which they differ, if there is any.
        words = re.match(r".*\S(?=\s)", chosen[:size] + chosen[size : size + 1], re.DOTALL)
        size = words.end() if words else size
        if not chosen[:size].strip():
            _refuse_conversations(row)
            _fault("the row has no `prompt`, and `chosen` and `rejected` start differently", row, PAIR_SHAPE)
    elif _starts_with_prompt(chosen) and _starts_with_prompt(rejected) and not isinstance(row.get("prompt"), list):
        assert isinstance(chosen, list) and isinstance(rejected, list)
        size = _common_size(chosen, rejected)
        if not size:
            _fault("`chosen` and `rejected` start with different messages", row, PAIR_SHAPE)
    else:
        return row
    fields = {"prompt": chosen[:size], "chosen": chosen[size:], "rejected": rejected[size:]}
    return DataRow(fields={**row.fields, **fields}, where=row.where)


def _starts_with_prompt(side: Any) -> bool:
    first = side[0] if isinstance(side, list) and side else None
    return isinstance(first, dict) and first.get("role", first.get("from")) not in (None, ASSISTANT, "gpt")


def _common_size(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Length of the common start of both sides, of which something is left."""
    most = min(len(chosen), len(rejected)) - 1
    return next((at for at in range(most) if chosen[at] != rejected[at]), max(most, 0))


def identical_replies(pair: PairText) -> UserError:
    """The error for a pair with two equal sides."""
    what = f"`chosen` and `rejected` are the same, {_texts(pair.chosen)[-1][:40]!r}"
    return UserError(what, where=pair.where, hint="remove the row")


def _messages(row: DataRow, shape: str) -> tuple[Message, ...]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        if prompt is None:
            _refuse_conversations(row)
        cure = f'{shape}; columns of other names: columns = {{ prompt = "question" }}' if prompt is None else shape
        _fault(f"expected either `prompt` or `messages`, found {_given(row)}", row, cure)
    field, listed = ("messages", messages) if prompt is None else ("prompt", prompt)
    if field == "prompt" and not isinstance(prompt, list):
        if not isinstance(prompt, str) or not prompt.strip():
            _fault("`prompt` must be a non-empty text, or a list of messages", row, shape)
        return (Message(role="user", content=prompt),)
    if not isinstance(listed, list) or not listed:
        _fault(f"`{field}` must be a non-empty list", row, shape)
    return tuple(_message(message, field, row, shape) for message in listed)


def _given(row: DataRow) -> str:
    return ", ".join(f"`{name}`" for name in row.fields if row.get(name) is not None) or "nothing"


def _refuse_conversations(row: DataRow) -> None:
    """Raises UserError: the row has its messages in a column of another format."""
    for name in CONVERSATIONS:
        listed = row.get(name)
        if isinstance(listed, list) and listed and isinstance(listed[0], dict):
            cure = SHAREGPT_CURE if "from" in listed[0] else f'name the column: columns = {{ messages = "{name}" }}'
            _fault(f"the row has `{name}` in place of `messages`", row, cure)


def _message(message: Any, field: str, row: DataRow, shape: str) -> Message:
    # A table gives every message all fields that any message has, with null values.
    given = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if set(given) == {"from", "value"}:
        _fault(f"`{field}` has messages with `from` and `value` (ShareGPT)", row, SHAREGPT_CURE)
    if set(given) != {"role", "content"}:
        _fault(f"each of `{field}` must have exactly the fields `role` and `content`", row, shape)
    if not all(isinstance(value, str) and value for value in given.values()):
        _fault(f"`role` and `content` of `{field}` must be non-empty texts", row, shape)
    return chat_message(**given, field=field, where=row.where)


def _reply(value: Any, field: str, row: DataRow, shape: str) -> Reply:
    """A completion: its text, or a list of messages."""
    if isinstance(value, list):
        turns = _turns(tuple(_message(message, field, row, shape) for message in value), field, row, shape)
        if not isinstance(turns, str):
            return turns
        value = turns
    if value is None:
        _fault(f"the row has no `{field}`, only {_given(row)}", row, shape)
    if not isinstance(value, str):
        _fault(f"`{field}` must be a text, found {type(value).__name__}", row, shape)
    if not value.strip():
        _fault(f"`{field}` is empty", row, "remove the row, or add the completion")
    return value


def _turns(messages: tuple[Message, ...], field: str, row: DataRow, shape: str) -> Reply:
    """The messages of several turns, or the text of a single one."""
    if not messages or messages[0].role != ASSISTANT or messages[-1].role != ASSISTANT:
        _fault(f"`{field}` must be a text, or messages that start and end with the role {ASSISTANT}", row, shape)
    between = [list(run) for spoken, run in groupby(messages, lambda each: each.role == ASSISTANT) if not spoken]
    if any(len(run) > 1 and any(each.role != "tool" for each in run) for run in between):
        _fault(f"`{field}` must have one message, or only tool messages, between two turns", row, shape)
    return messages if len(messages) > 1 else messages[0].content


def _metadata(row: DataRow, name: str) -> Any:
    value = row.get(name)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        what = f"`{name}` holds a {type(value).__name__}, which JSON cannot represent"
        _fault(what, row, "convert that column to text, or remove it")
    return value


def _fault(what: str, row: DataRow, hint: str) -> NoReturn:
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
    if not prompt.answer or not prompt.answer.strip():
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
    return [
        {
            **question_row(prompt),
            "chosen": samples[correct].text,
            "rejected": samples[incorrect].text,
            "chosen_sample": correct,
            "rejected_sample": incorrect,
            "prompt_id": prompt.prompt_id,
        }
        for correct, incorrect in zip(cycle(right), wrong, strict=False)
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
