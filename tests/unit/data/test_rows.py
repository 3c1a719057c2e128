"""What each kind of row must hold; every fault names its place and its field."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.data_files import FORMATS, read_demonstrations, read_items, read_pairs, write
from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.data.given_prompts import questions
from tidemill.data.prompts import RawPrompt, content_id
from tidemill.data.row_files import DataRow
from tidemill.data.rows import to_demonstration, to_item, to_pair

USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("data_format", FORMATS)
def test_demonstrations_in_every_shape(tmp_path: Path, data_format: str) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "2+2=", "completion": "4"}]
    chat: list[dict[str, Any]] = [{"messages": [USER], "completion": "4"}, {"messages": [USER, ASSISTANT]}]
    (plain,) = read_demonstrations(write(tmp_path, data_format, rows))
    assert (plain.messages[0].content, plain.completion, plain.plain) == ("2+2=", "4", True)
    for read in read_demonstrations(write(tmp_path, data_format, chat, "chat")):
        assert (read.messages, read.completion, read.plain) == ((Message(**USER),), "4", False)


@pytest.mark.parametrize("data_format", FORMATS)
def test_pairs_in_every_shape(tmp_path: Path, data_format: str) -> None:
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": 0.5}, USER_PAIR]
    first, second = read_pairs(write(tmp_path, data_format, rows))
    assert (first.chosen, first.rejected, first.margin, first.plain) == ("4", "5", 0.5, True)
    assert (second.messages, second.chosen, second.margin, second.plain) == ((Message(**USER),), "4", 0.0, False)


USER_PAIR: dict[str, Any] = {"messages": [USER], "chosen": "4", "rejected": "22"}


def test_completions_as_the_assistants_message(tmp_path: Path) -> None:
    row = {"messages": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "5"}]}
    (pair,) = read_pairs(write(tmp_path, "parquet", [row]))
    assert (pair.chosen, pair.rejected) == ("4", "5")


AGAIN = {"role": "user", "content": "3+3?"}
TOOL = {"role": "tool", "content": "6"}
SIX = {"role": "assistant", "content": "6"}


@pytest.mark.parametrize("data_format", FORMATS)
def test_all_turns_of_a_conversation_are_learned(tmp_path: Path, data_format: str) -> None:
    turns = [ASSISTANT, AGAIN, SIX]
    rows: list[dict[str, Any]] = [
        {"messages": [USER, *turns]},
        {"prompt": [USER], "completion": turns},
    ]
    for number, row in enumerate(rows):
        (read,) = read_demonstrations(write(tmp_path, data_format, [row], f"rows{number}"))
        assert read.messages == (Message(**USER),)
        assert read.completion == tuple(Message(**turn) for turn in turns)
    (plain,) = read_demonstrations(write(tmp_path, data_format, [{"prompt": "q", "completion": turns}], "plain"))
    assert plain.plain
    # A completion of its own: earlier turns of the assistant belong to the prompt.
    (single,) = read_demonstrations(
        write(tmp_path, data_format, [{"messages": [USER, ASSISTANT, AGAIN], "completion": "6"}], "single")
    )
    assert (len(single.messages), single.completion) == (3, "6")


def test_tools_and_their_results(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    turns = [ASSISTANT, TOOL, TOOL, SIX]
    row = {"prompt": "q", "chosen": turns, "rejected": "7", "tools": [tool]}
    (pair,) = read_pairs(write(tmp_path, "jsonl", [row]))
    assert (pair.tools, pair.plain, len(pair.chosen), pair.rejected) == ((tool,), False, 4, "7")
    (read,) = read_demonstrations(write(tmp_path, "jsonl", [{"messages": [USER, *turns], "tools": [tool]}], "d"))
    assert read.tools == (tool,)


def test_the_id_of_a_conversation_is_of_all_its_messages(tmp_path: Path) -> None:
    conversations = [[USER, ASSISTANT, AGAIN, SIX], [USER, ASSISTANT, TOOL, SIX], [USER, ASSISTANT, AGAIN, ASSISTANT]]
    rows: list[dict[str, Any]] = [{"messages": messages} for messages in conversations]
    assert len({content_id(read) for read in read_demonstrations(write(tmp_path, "jsonl", rows))}) == 3


def test_fields_that_a_table_adds_empty_to_messages_do_not_matter(tmp_path: Path) -> None:
    rows = [{"messages": [{**USER, "name": None}], "answer": "4"}]
    (item,) = read_items(write(tmp_path, "parquet", rows))
    assert item.messages == (Message(**USER),)


def test_the_id_is_of_the_texts_and_not_of_margin_or_place(tmp_path: Path) -> None:
    base = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows: list[dict[str, Any]] = [
        base,
        {**base, "margin": 1},
        {**base, "chosen": "c"},
        {"prompt": "q", "chosen": "b", "rejected": "a"},
    ]
    ids = [content_id(pair) for pair in read_pairs(write(tmp_path, "jsonl", rows))]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def faults(read: Callable[[Path], Any], tmp_path: Path, row: dict[str, Any], good: dict[str, Any]) -> UserError:
    path = write(tmp_path, "jsonl", [good, row])
    with pytest.raises(UserError) as caught:
        list(read(path))
    assert caught.value.where == f"{path}, line 2"
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "q"}, "the row has no `completion`"),
        ({"prompt": "q", "completion": ""}, "`completion` is empty"),
        ({"prompt": "q", "completion": " \n"}, "`completion` is empty"),
        ({"prompt": "q", "completion": 4}, "`completion` must be a text, found int"),
        (
            {"prompt": "q", "completion": [USER]},
            "must be a text, or messages that start and end with the role assistant",
        ),
        ({"prompt": "q", "completion": [ASSISTANT, USER]}, "messages that start and end with the role assistant"),
        (
            {"prompt": "q", "completion": [ASSISTANT, USER, USER, ASSISTANT]},
            "must have one message, or only tool messages",
        ),
        ({"messages": [USER]}, "the row has no `completion`"),
        ({"messages": [ASSISTANT]}, "`messages` holds only the assistant's turn"),
        ({"question": "q", "body": "a"}, "expected either `prompt` or `messages`, found `question`, `body`"),
        ({"text": " "}, "`text` is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "the row is a preference pair (`chosen`, `rejected`)"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, SIX]}, "the row is a preference pair"),
        ({"prompt": 4, "completion": "4"}, "`prompt` must be a non-empty text, or a list of messages"),
    ],
)
def test_faults_of_demonstrations(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    assert what in faults(read_demonstrations, tmp_path, row, {"prompt": "q", "completion": "a"}).what


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"rejected": "b"}, "the row has no `chosen`"),
        ({"chosen": "a"}, "the row has no `rejected`"),
        ({"completion": "a"}, "the row has a `completion` and no `chosen`"),
        ({"prompt": None, "chosen": "a b", "rejected": "c d"}, "`chosen` and `rejected` start differently"),
        ({"chosen": [USER, ASSISTANT], "rejected": [AGAIN, SIX]}, "start with different messages"),
        ({"chosen": "a", "rejected": "  "}, "`rejected` is empty"),
        ({"chosen": "a", "rejected": "a"}, "`chosen` and `rejected` are the same, 'a'"),
        ({"chosen": "a", "rejected": "b", "margin": "1"}, "`margin` must be a non-negative number, found '1'"),
        ({"chosen": "a", "rejected": "b", "margin": -1}, "`margin` must be a non-negative number, found -1"),
        ({"chosen": "a", "rejected": "b", "margin": True}, "`margin` must be a non-negative number"),
    ],
)
def test_faults_of_pairs(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert what in faults(read_pairs, tmp_path, {"prompt": "q", **row}, good).what


@pytest.mark.parametrize(
    ("row", "prompt", "sides"),
    [
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, SIX]}, (USER,), ("4", "6")),
        # A data set may repeat the prompt as a text beside whole conversations.
        ({"prompt": "2+2=", "chosen": [USER, ASSISTANT], "rejected": [USER, SIX]}, (USER,), ("4", "6")),
        (
            {"chosen": [USER, ASSISTANT, AGAIN, SIX], "rejected": [USER, ASSISTANT, AGAIN, ASSISTANT]},
            (USER, ASSISTANT, AGAIN),
            ("6", "4"),
        ),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "The sky is", (" blue.", " green.")),
        # The sides differ inside of a word.
        ({"chosen": "Human: hi\n\nBot: It's", "rejected": "Human: hi\n\nBot: I"}, "Human: hi\n\nBot:", (" It's", " I")),
        ({"chosen": "2+2=4", "rejected": "2+2=5"}, "2+2=", ("4", "5")),
    ],
)
def test_pairs_may_contain_their_prompt(
    tmp_path: Path, row: dict[str, Any], prompt: Any, sides: tuple[str, str]
) -> None:
    (pair,) = read_pairs(write(tmp_path, "jsonl", [row]))
    asked = [USER | {"content": prompt}] if isinstance(prompt, str) else prompt
    assert pair.messages == tuple(Message(**message) for message in asked)
    assert (pair.chosen, pair.rejected) == sides
    assert pair.plain == isinstance(prompt, str)


def test_metadata_that_json_cannot_write_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "a", "asked_at": dt.date(2026, 1, 2)}]
    with pytest.raises(UserError, match="`asked_at` holds a date, which JSON cannot represent") as caught:
        list(read_items(write(tmp_path, "parquet", rows)))
    assert caught.value.where.endswith("row 0 (from 0)")


def test_a_question_alone_has_no_replies() -> None:
    question = RawPrompt(messages=(Message(**USER),))
    assert question.replies == ()


OWN = {"role": "system", "content": "Own."}
GIVEN = {"role": "system", "content": "Configured."}


@pytest.mark.parametrize(
    ("parse", "row"),
    [
        (to_item, {"messages": [USER]}),
        (to_item, {"prompt": [USER]}),
        (to_demonstration, {"messages": [USER, ASSISTANT, AGAIN, SIX]}),
        (to_demonstration, {"prompt": [USER], "completion": [ASSISTANT]}),
        (to_pair, {"prompt": [USER], "chosen": "4", "rejected": "5"}),
        (to_pair, {"chosen": [USER, ASSISTANT], "rejected": [USER, SIX]}),
    ],
)
def test_a_rows_own_system_message_replaces_the_configured_one(parse: Callable[..., Any], row: dict[str, Any]) -> None:
    def messages(*system: dict[str, str], prompt: str) -> tuple[Message, ...]:
        fields = {
            name: [*system, *value] if isinstance(value, list) and value[0] == USER else value
            for name, value in row.items()
        }
        read = parse(DataRow(fields=fields, where=""), columns={}, system_prompt=prompt)
        assert read.replies == parse(DataRow(fields=row, where=""), columns={}, system_prompt="").replies
        return tuple(read.messages)

    assert messages(prompt=GIVEN["content"]) == (Message(**GIVEN), Message(**USER))
    for own in (OWN, {**OWN, "role": "developer"}):
        assert messages(own, prompt=GIVEN["content"]) == messages(OWN, prompt="") == (Message(**OWN), Message(**USER))


HUMAN = {"role": "human", "content": "2+2?"}
SAID = {"from": "human", "value": "2+2?"}
ANSWERED = {"from": "gpt", "value": "4"}


@pytest.mark.parametrize(
    ("parse", "row", "what", "hint"),
    [
        (to_item, {"messages": [HUMAN]}, "`messages` has a message with the role 'human'", 'write "user" in place'),
        (to_item, {"prompt": [{**HUMAN, "role": "critic"}]}, "the role 'critic'", "the roles are system, user,"),
        (to_demonstration, {"messages": [USER, {**ASSISTANT, "role": "gpt"}]}, "the role 'gpt'", '"assistant"'),
        (to_demonstration, {"prompt": "q", "completion": [{**ASSISTANT, "role": "Bot"}]}, "`completion` has", "bot"),
        (to_pair, {"prompt": [HUMAN], "chosen": "4", "rejected": "5"}, "the role 'human'", '"user"'),
        (to_pair, {"chosen": [HUMAN, ASSISTANT], "rejected": [HUMAN, SIX]}, "the role 'human'", '"user"'),
        (to_item, {"conversations": [SAID]}, "`conversations` in place of `messages`", "rename `from` to role"),
        (to_item, {"conversations": [USER]}, "in place of `messages`", 'columns = { messages = "conversations" }'),
        (to_item, {"messages": [SAID]}, "`from` and `value` (ShareGPT)", "rename `from` to role"),
        (to_demonstration, {"conversations": [SAID, ANSWERED]}, "in place of", "rename `from` to role"),
        (to_pair, {"conversations": [SAID], "chosen": ANSWERED, "rejected": SAID}, "in place of", "rename `from`"),
        (to_pair, {"chosen": [SAID, ANSWERED], "rejected": [SAID, SAID]}, "`from` and `value`", "rename `from`"),
    ],
)
def test_roles_and_fields_of_other_formats_are_refused(
    parse: Callable[..., Any], row: dict[str, Any], what: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse(DataRow(fields=row, where="rows.jsonl, line 2"), columns={}, system_prompt="")
    assert what in caught.value.what
    assert hint.lower() in caught.value.hint.lower()
    assert caught.value.where == "rows.jsonl, line 2"


@pytest.mark.parametrize("given", [[HUMAN], [Message(**HUMAN)], {"messages": [HUMAN]}])
def test_given_prompts_have_the_same_roles(given: Any) -> None:
    with pytest.raises(UserError, match="the role 'human'"):
        questions(given)
    (question,) = questions([{"role": "developer", "content": "Own."}, USER])
    assert question.messages[0] == Message(**OWN)
