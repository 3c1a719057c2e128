"""The checks that several benchmarks share."""

from __future__ import annotations

import pytest

from benchmarks.subjects import check_counts, check_different, check_equal, check_models, check_signal
from benchmarks.turns import SideResult, Turn, Work
from tidemill.telemetry.metrics import MetricLine


def side(*turns: dict[str, float]) -> SideResult:
    work = Work(samples=64, prompt_tokens=1, completion_tokens=1)
    return SideResult(turns=[Turn(wall_s=1, cpu_s=1, work=work, notes=notes) for notes in turns], peak_rss_bytes=1)


def test_a_count_of_zero_or_of_no_number_fails() -> None:
    check_counts("seed 0", evictions=1, migrated_samples=2)
    with pytest.raises(RuntimeError, match=r"^seed 0: no evictions, no migrated samples, so there is nothing"):
        check_counts("seed 0", evictions=0, migrated_samples=float("nan"), steps=3)


def test_sides_with_different_values_fail() -> None:
    check_equal("samples", {"ours": [1, 2], "theirs": [1, 2]})
    with pytest.raises(RuntimeError, match=r"different samples: {'ours': 1, 'theirs': 2}"):
        check_equal("samples", {"ours": 1, "theirs": 2})


def test_cases_with_the_same_value_fail() -> None:
    check_different("curves", {"grpo": [1, 2], "ppo": [1, 3]})
    with pytest.raises(RuntimeError, match="grpo and rloo have the same curves"):
        check_different("curves", {"grpo": [1, 2], "ppo": [1, 3], "rloo": [1, 2]})


def test_a_step_whose_groups_have_no_signal_fails() -> None:
    result = side({"groups_without_signal": 0}, {"groups_without_signal": 1})
    check_signal("TRL", result, most=1)
    with pytest.raises(RuntimeError, match="TRL: 1 groups of a step have no signal, allowed are 0"):
        check_signal("TRL", result)


def line(**values: float) -> MetricLine:
    return MetricLine(
        step=1, policy_version=1, weights_digest="", optimizer_steps=1, session=1, elapsed_s=0.0, values=values
    )


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"kl_ref": 0.1, "value_loss": 0.1}, "no trained tokens"),
        ({"tokens_trained": 9.0, "value_loss": 0.1}, "trained without a reference"),
        ({"tokens_trained": 9.0, "kl_ref": 0.1}, "trained without a critic"),
    ],
)
def test_a_run_that_trains_nothing_or_without_a_model_fails(values: dict[str, float], why: str) -> None:
    whole = {"tokens_trained": 9.0, "kl_ref": 0.1, "value_loss": 0.1}
    check_models("PPO", [line(), line(**whole)], reference=True, critic=True)
    with pytest.raises(RuntimeError, match=f"PPO: {why}"):
        check_models("PPO", [line(), line(**values)], reference=True, critic=True)
    with pytest.raises(RuntimeError, match="GRPO: trained with a reference"):
        check_models("GRPO", [line(**whole)], reference=False)
