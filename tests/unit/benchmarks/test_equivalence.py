"""The equivalence benchmark fails if no sample moved, however equal the runs are."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.equivalence import check_disturbed
from benchmarks.learning_curves import Curve, check_curve
from benchmarks.twin_batches import StepComparison, check_steps

RUN = {
    "seed": 0,
    "steps": 20,
    "steps_that_learned": 20,
    "evictions": 269,
    "migrations": 2296,
    "tokens_kept": 19446,
    "tokens_lost": 1920,
}
STEP = StepComparison(
    step=1,
    version=0,
    samples=64,
    migrated=64,
    identical=64,
    tokens=1266,
    tokens_compared=1266,
    largest_logprob_difference=0.0,
    evictions={"mid_tick": 13, "noticed": 5},
    tokens_lost=379,
    lost_more_than_a_tick=0,
    lost_after_notice=0,
)
CURVE = Curve(recipe="", seed=0, accuracy={0: 0.1}, n=32, evictions=24, migrations=94, training_s=1.0)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"evictions": 0}, "no evictions"),
        ({"migrations": 0}, "no migrations"),
        ({"tokens_kept": 0}, "no tokens kept"),
        ({"tokens_lost": 0}, "no tokens lost"),
        ({"steps_that_learned": 19}, "only 19 of 20 steps learned"),
    ],
)
def test_a_run_that_was_not_disturbed_fails(broken: dict[str, int], why: str) -> None:
    check_disturbed(RUN)
    with pytest.raises(RuntimeError, match=f"seed 0: {why}"):
        check_disturbed(RUN | broken)


def test_a_twin_batch_whose_samples_stayed_fails() -> None:
    check_steps([STEP])
    with pytest.raises(RuntimeError, match="step 1: no evictions, no migrated samples"):
        check_steps([STEP, msgspec.structs.replace(STEP, evictions={}, migrated=0)])


def test_a_curve_of_the_other_kind_fails() -> None:
    quiet = msgspec.structs.replace(CURVE, evictions=0, migrations=0)
    check_curve("evicted", CURVE)
    check_curve("quiet", quiet)
    with pytest.raises(RuntimeError, match="no evictions, no migrations"):
        check_curve("evicted", quiet)
    with pytest.raises(RuntimeError, match="24 evictions, expected none"):
        check_curve("quiet", CURVE)
