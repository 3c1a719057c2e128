"""The careless teacher."""

from __future__ import annotations

import pytest

from benchmarks.sft_start import CARELESS, COPIES, TASK, carryless, demonstrations
from tidemill.config.task import ArithmeticTask
from tidemill.data.arithmetic import Problem, split_listed


@pytest.mark.parametrize(
    ("left", "right", "answer"),
    # 7+5 = 12 -> 2 and 4+8 = 12 -> 2; 5+5 -> 0 and no tens; 9+1 -> 0, the tens stay; nothing to carry.
    [(47, 85, "22"), (5, 5, "0"), (39, 1, "30"), (50, 50, "0"), (12, 34, "46"), (0, 0, "0"), (99, 9, "98")],
)
def test_no_carry_is_carried(left: int, right: int, answer: str) -> None:
    assert carryless(Problem(operator="+", left=left, right=right)) == answer


def test_the_teacher_uses_training_problems_with_the_given_error_rate() -> None:
    train, held_out = split_listed(ArithmeticTask.model_validate(TASK), [])
    rows = demonstrations()
    assert rows == demonstrations()
    assert len(rows) == COPIES * len(train)
    assert not {row["prompt"] for row in rows} & {problem.question for problem in held_out}
    right = {problem.question: problem.answer + "\n" for problem in train}
    could_be_wrong = {problem.question for problem in train if carryless(problem) != problem.answer}
    carried = [row for row in rows if row["prompt"] in could_be_wrong]
    assert all(row["completion"] == right[row["prompt"]] for row in rows if row["prompt"] not in could_be_wrong)
    wrong = sum(row["completion"] != right[row["prompt"]] for row in carried)
    # About 21,000 throws: a deviation of 0.003.
    assert wrong / len(carried) == pytest.approx(CARELESS, abs=0.015)
