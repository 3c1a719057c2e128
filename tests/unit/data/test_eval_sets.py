"""The prompts of `eval.sets`, and what is refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.char_codec import CharCodec
from tidemill.config.schema import RunSpec
from tidemill.config.task import RewardConfig
from tidemill.core.errors import UserError
from tidemill.data.build_task import build_task
from tidemill.data.eval_sets import with_eval_sets
from tidemill.data.prompts import Task
from tidemill.scoring.scorer import check_rewards

RENAMED = {"prompt": "question"}


def made(tmp_path: Path, rows: list[dict[str, Any]], **config: Any) -> Task:
    """A task of a file with the column `question`, and one set."""
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "{a}+1="}}\n' for a in range(9)))
    path = tmp_path / "math.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    spec = RunSpec.model_validate({
        "task": {"kind": "file", "path": tmp_path / "train.jsonl", "columns": RENAMED, "system_prompt": "Add."},
        "eval": {"prompts": 2, "sets": [{"name": "math", "path": path} | config]},
    })  # fmt: skip
    task = build_task(spec.task, codec=CharCodec(), batch_prompts=1, seed=0, chat_template=False)
    return with_eval_sets(task, spec, codec=CharCodec())


def test_a_set_has_the_columns_and_the_system_prompt_of_the_task(tmp_path: Path) -> None:
    rows = [{"question": f"{a}+123=", "answer": a + 123, "level": a} for a in range(4)]
    task = made(tmp_path, rows)
    found = task.eval_sets["math"]
    assert len(found.prompts) == 2  # eval.prompts
    assert all(prompt.text.startswith("Add.\n\n") and prompt.text.endswith("+123=") for prompt in found.prompts)
    assert found.columns == ("level",)
    assert task.longest_prompt_tokens == len("Add.\n\n1+123=")
    assert len(made(tmp_path, rows, prompts=3).eval_prompts["math"]) == 3


def test_a_set_may_have_columns_of_its_own(tmp_path: Path) -> None:
    (prompt,) = made(tmp_path, [{"prompt": "1+2="}], columns={}, system_prompt="").eval_prompts["math"]
    assert prompt.text == "1+2="


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"answer": "4"}], ("the row has no column `question`", "math.jsonl, line 1", "correct eval.sets[0].columns")),
        ([], ("the file has no rows", "math.jsonl", "a row looks like")),
    ],
)
def test_rows_without_a_prompt_are_refused(tmp_path: Path, rows: list[dict[str, Any]], says: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        made(tmp_path, rows)
    for part, expected in zip((caught.value.what, caught.value.where, caught.value.hint), says, strict=True):
        assert expected in part


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        made(tmp_path, [], path="nowhere.jsonl")
    assert str(caught.value) == "eval.sets[0].path: nowhere.jsonl: no such file or folder\n  correct the path"


def test_a_reward_that_needs_a_column_which_a_set_lacks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(completion, level):\n    return level\n")
    rewards = [RewardConfig(kind="python", function=f"{file}:score")]
    check_rewards(rewards, made(tmp_path, [{"question": "1+2=", "level": 3}]))
    task = made(tmp_path, [{"question": "1+2="}])
    with pytest.raises(UserError) as caught:
        check_rewards(rewards, task)
    assert caught.value.where == "eval.sets, math"
    assert caught.value.what == f"score ({file}:1) takes an argument `level`, which does not exist in these rows"
    assert caught.value.hint.endswith("add the column, or set eval.rewards")
    with pytest.raises(UserError, match='the reward "task" scores only the prompts of its task'):
        check_rewards([RewardConfig(kind="task")], task)
