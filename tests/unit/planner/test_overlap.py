from __future__ import annotations

import pytest

from tests.formulas import check_figures
from tidemill.core.errors import UserError
from tidemill.planner.overlap import plan_overlap


def test_whole_gpus_on_either_side() -> None:
    # of 8 GPUs 5 generate, 60 / 5 = 12, and 3 train, 40 / 3 = 13.3: the trainer never waits
    assert (plan_overlap(60, 40, gpus=8).rollout_gpus, plan_overlap(60, 40, gpus=8).resized) == (5, 1.0)
    # of 2 one each: 40 / max(60, 40)
    assert plan_overlap(60, 40, gpus=2).resized == pytest.approx(2 / 3)
    # of 7: 4 and 3, 15 against 13.3: 13.3 / 15; 5 and 2 would be 20
    assert plan_overlap(60, 40, gpus=7).resized == pytest.approx(40 / 3 / 15)


def test_a_trainer_that_takes_longer_never_waits_when_overlapped() -> None:
    assert plan_overlap(20, 80).overlapped == 1.0
    assert plan_overlap(20, 80).in_sequence == pytest.approx(0.8)


def test_every_number_equals_its_formula() -> None:
    assert check_figures(plan_overlap(7, 3, gpus=9).figures) == 4


def test_invalid_questions_are_refused() -> None:
    with pytest.raises(UserError, match="cannot be divided"):
        plan_overlap(60, 40, gpus=1)
    for rollout, training in ((0, 40), (60, -1), (float("nan"), 1), (1, float("inf"))):
        with pytest.raises(UserError, match="above 0"):
            plan_overlap(rollout, training)
