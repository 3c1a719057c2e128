from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tidemill.algos.advantages import ADVANTAGES, dr_grpo, grpo, has_signal, rloo
from tidemill.config.algorithm import ADVANTAGE_NAMES

NAN, INF = math.nan, math.inf


def advantages(rewards: list[float], valid: list[bool] | None = None) -> list[float]:
    mask = torch.tensor(valid if valid is not None else [True] * len(rewards))
    result: list[float] = grpo(torch.tensor(rewards), mask).tolist()
    return result


def test_grpo_two_of_four_right() -> None:
    # mean 0.5; deviations ±0.5; variance 4 * 0.25 / 3 = 1/3, std 0.5773503; 0.5 / (0.5773503 + 0.0001) = 0.8658754
    assert advantages([0.0, 1.0, 1.0, 0.0]) == pytest.approx([-0.8658754, 0.8658754, 0.8658754, -0.8658754], abs=1e-6)


def test_grpo_one_of_eight_right() -> None:
    # mean 0.125; variance (0.875² + 7 * 0.125²) / 7 = (0.765625 + 0.109375) / 7 = 0.125, std 0.3535534
    # right: 0.875 / 0.3536534 = 2.4741739; wrong: -0.125 / 0.3536534 = -0.3534534
    assert advantages([1.0] + [0.0] * 7) == pytest.approx([2.4741739] + [-0.3534534] * 7, abs=1e-6)


def test_the_floor_limits_advantages_of_tiny_differences() -> None:
    # mean 0.00005, std sqrt(2 * 0.00005²) = 0.0000707107; 0.00005 / (0.0000707107 + 0.0001) = 0.2928932
    assert advantages([0.0, 0.0001]) == pytest.approx([-0.2928932, 0.2928932], abs=1e-6)


@pytest.mark.parametrize("invalid", [0.0, 100.0, NAN, INF])
def test_invalid_samples_get_zero_and_do_not_count(invalid: float) -> None:
    # over the valid (1, 0): mean 0.5, std sqrt(0.5) = 0.7071068; 0.5 / 0.7072068 = 0.7070068
    result = advantages([1.0, invalid, 0.0], [True, False, True])
    assert result == pytest.approx([0.7070068, 0.0, -0.7070068], abs=1e-6)


def test_dr_grpo_subtracts_the_mean() -> None:
    # (1, 2, 6) without the invalid one: mean 3
    rewards, valid = torch.tensor([1.0, NAN, 2.0, 6.0]), torch.tensor([True, False, True, True])
    assert dr_grpo(rewards, valid).tolist() == [-2.0, 0.0, -1.0, 3.0]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5
    rewards, valid = torch.tensor([1.0, NAN, 2.0, 6.0]), torch.tensor([True, False, True, True])
    assert rloo(rewards, valid).tolist() == pytest.approx([-3.0, 0.0, -1.5, 4.5])


@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo])
def test_equal_or_single_rewards_give_exact_zeros(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert function(torch.tensor([0.1, 0.1, 0.1]), torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3
    assert function(torch.tensor([0.1, NAN]), torch.tensor([True, False])).tolist() == [0.0] * 2
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).shape == (0,)


def test_scopes() -> None:
    assert ADVANTAGES["grpo"].scope == "group"
    assert ADVANTAGES["gae"].scope == "sample"


@pytest.mark.parametrize("valid", [[False, False, False], [True, False, False]])
def test_fewer_than_two_valid_samples_give_zeros(valid: list[bool]) -> None:
    assert advantages([1.0, 0.0, NAN], valid) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -3.3, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_are_exactly_zero(reward: float, size: int) -> None:
    # A mean of equal floats need not be that float: 0.1 summed three times and divided is not 0.1.
    assert advantages([reward] * size) == [0.0] * size


def test_differences_on_a_large_offset_are_kept() -> None:
    # 1e6 and 1e6 + 1 are exact in float32; with a float32 mean of squares the difference would be lost
    assert advantages([1e6, 1e6 + 1]) == pytest.approx([-0.7070068, 0.7070068], abs=1e-6)


def test_result_is_float32_for_any_reward_type() -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        assert grpo(torch.tensor([0, 1], dtype=dtype), torch.tensor([True, True])).dtype == torch.float32


def test_has_signal() -> None:
    assert has_signal(torch.tensor([0.0, -0.1, 0.1]))
    assert not has_signal(torch.zeros(4))
    assert not has_signal(torch.zeros(0))


def test_registry_entries_have_scope_formula_and_source() -> None:
    row = ADVANTAGES["grpo"]
    assert row.function is grpo
    assert row.scope == "group"
    assert "mean" in row.formula
    assert "2402.03300" in row.source


def test_config_names_match_the_registry() -> None:
    assert tuple(ADVANTAGES) == ADVANTAGE_NAMES
