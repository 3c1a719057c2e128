"""Rows of other people's files: renamed columns, system prompts, tools, missing answers, long prompts."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from tests.char_codec import CharCodec
from tidemill.config.task import FileTask
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt
from tidemill.data.build_task import build_task
from tidemill.data.prompts import Task

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def task(tmp_path: Path, rows: list[dict[str, Any]], **config: Any) -> Task:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    made = FileTask(kind="file", path=path, **config)
    return build_task(made, codec=CharCodec(), batch_prompts=2, seed=0, chat_template=False)


def prompts(task: Task) -> list[Prompt]:
    return [*task.source.held_out(), *(prompt for step in (1, 2, 3, 4) for _, prompt in task.source.train_batch(step))]


def test_columns_are_renamed_and_the_others_are_metadata(tmp_path: Path) -> None:
    rows = [{"question": f"{a}+1=", "solution": a + 1, "level": a} for a in range(8)]
    made = task(tmp_path, rows, columns={"prompt": "question", "answer": "solution"})
    assert made.columns == ("level",)
    for prompt in prompts(made):
        assert prompt.metadata == {"level": int(prompt.text[0])}
        assert prompt.answer == str(int(prompt.text[0]) + 1)


def test_a_column_that_a_row_lacks_is_named_with_its_line(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": "1+1=", "solution": 2}, {"question": "1+2="}]
    with pytest.raises(UserError) as caught:
        task(tmp_path, rows, columns={"prompt": "question", "answer": "solution"})
    assert caught.value.what == "the row has no column `solution`"
    assert caught.value.where.endswith("rows.jsonl, line 2")
    assert "question" in caught.value.hint


def test_answers_are_optional_and_messages_may_be_under_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{a}+1="}]} for a in range(8)]
    made = task(tmp_path, rows)
    assert {prompt.answer for prompt in prompts(made)} == {None}
    assert all(prompt.messages[0].role == "user" for prompt in prompts(made))


def test_a_system_prompt_comes_first(tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "answer": ""} for a in range(8)]
    assert all(prompt.text.startswith("1+1=2\n\n") for prompt in prompts(task(tmp_path, rows, system_prompt="1+1=2")))


def test_a_rows_own_system_message_replaces_the_configured_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "0"}]
    rows = [{"messages": [*own[: a % 2], {"role": "user", "content": f"{a}+1="}]} for a in range(8)]
    for prompt in prompts(task(tmp_path, rows, system_prompt="1")):
        system = "0" if int(prompt.messages[-1].content[0]) % 2 else "1"
        assert [(each.role, each.content) for each in prompt.messages[:-1]] == [("system", system)]


def test_tools_are_part_of_the_content(tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "answer": ""} for a in range(8)]
    plain, listed, written = (
        task(tmp_path, [row | added for row in rows])
        for added in ({}, {"tools": [TOOL]}, {"tools": json.dumps([TOOL])})
    )
    assert plain.digest != listed.digest == written.digest
    assert all(prompt.messages for prompt in prompts(listed))  # only a chat template can show tools
    faults: list[Any] = ["[", [1], {"a": 1}]
    for wrong in faults:
        with pytest.raises(UserError, match="`tools`"):
            task(tmp_path, [row | {"tools": wrong} for row in rows])


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "1" * length, "answer": ""} for length in range(1, 21)]
    made = task(tmp_path, rows, max_prompt_tokens=15, held_out_fraction=0.5)
    assert made.train_size + made.held_out_size == 15
    assert made.longest_prompt_tokens == 15
    assert "5 longer than 15 tokens" in made.description
    with pytest.raises(UserError, match="at most 1 tokens"):
        task(tmp_path, rows[5:], max_prompt_tokens=1)


def test_all_prompts_can_be_evaluated(tmp_path: Path) -> None:
    made = task(tmp_path, [{"prompt": f"{a}+1="} for a in range(8)], held_out_fraction=1.0)
    assert made.train_size == made.held_out_size == 8


SAME: dict[str, Any] = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("rows", "distinct"),
    [
        ([SAME | {"rubric": f"r{number}"} for number in range(12)], 12),
        ([SAME | {"tests": [{"a": 1, "b": number}]} for number in range(3)], 3),
        ([SAME, SAME | {"rubric": "r"}], 2),
        ([SAME, SAME | {"rubric": None}], 1),
        ([SAME | {"tests": {"a": 1, "b": 2}, "level": 1}, SAME | {"level": 1, "tests": {"b": 2, "a": 1}}], 1),
        ([{"prompt": "1+1=", "rubric": "a"}, {"prompt": "1+1=", "rubric": "b"}], 2),
    ],
)
@pytest.mark.parametrize("index_above_mb", [256, 0])
def test_rows_are_repeated_only_if_a_reward_sees_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], distinct: int, index_above_mb: float
) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    made = task(tmp_path, rows, held_out_fraction=1.0, index_above_mb=index_above_mb)
    assert made.train_size == made.held_out_size == distinct
    assert made.left_out == ({"repeated": len(rows) - distinct} if distinct < len(rows) else {})
    assert len({prompt.prompt_id for prompt in made.source.held_out()}) == distinct


@pytest.mark.parametrize("row", [{"prompt": "1+1="}, {"prompt": "1+1=", "answer": None, "level": None}])
def test_ids_of_rows_without_other_columns_stay(tmp_path: Path, row: dict[str, Any]) -> None:
    """They decide the noise of a sample. The hash is of the JSON text [[["user", "1+1="]], ANSWER]."""
    (unanswered,) = task(tmp_path, [row], held_out_fraction=1.0).source.held_out()
    (answered,) = task(tmp_path, [SAME], held_out_fraction=1.0).source.held_out()
    expected = [
        blake2b(f'[[["user", "1+1="]], "{answer}"]'.encode(), digest_size=16).hexdigest() for answer in ("", "2")
    ]
    assert [unanswered.prompt_id, answered.prompt_id] == expected


def test_rows_of_one_question_are_on_one_side_whatever_their_columns(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number % 9}+1=", "answer": "1", "rubric": f"r{number}"} for number in range(27)]
    made = task(tmp_path, rows, held_out_fraction=0.5)
    assert made.train_size + made.held_out_size == 27
    held_out = {prompt.text for prompt in made.source.held_out()}
    assert made.held_out_size == 3 * len(held_out)
    assert not held_out & {prompt.text for step in range(1, 14) for _, prompt in made.source.train_batch(step)}
