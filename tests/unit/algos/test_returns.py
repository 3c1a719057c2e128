from __future__ import annotations

import pytest
import torch

from tidemill.algos.returns import discounted_returns, gae, whiten


def one(
    rewards: list[float],
    values: list[float],
    final: float,
    *,
    end: str,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> list[float]:
    """One episode; `final` is the value of the state after its last step."""
    last = torch.zeros(len(rewards), dtype=torch.bool)
    last[-1] = True
    never = torch.zeros_like(last)
    result: list[float] = gae(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor([*values[1:], final], dtype=torch.float64),
        terminated_T=last if end == "terminated" else never,
        truncated_T=last if end == "truncated" else never,
        gamma=gamma,
        lam=lam,
    ).tolist()
    return result


def test_termination_ignores_the_next_value() -> None:
    # δ = (0 + .9 * 2 - 1, 3 - 2) = (.8, 1); A = (.8 + .9 * .5 * 1, 1)
    assert one([0.0, 3.0], [1.0, 2.0], 1e9, end="terminated", gamma=0.9, lam=0.5) == pytest.approx([1.25, 1.0])


def test_truncation_uses_the_value_of_the_final_observation() -> None:
    # δ_1 = 3 + .9 * 10 - 2 = 10; A = (.8 + .45 * 10, 10)
    assert one([0.0, 3.0], [1.0, 2.0], 10.0, end="truncated", gamma=0.9, lam=0.5) == pytest.approx([5.3, 10.0])


def test_an_end_separates_episodes() -> None:
    # Two episodes of two steps in one row: the first is truncated, its final observation has value 10; the second
    # starts in a state of value 7. Each alone gives the same.
    rewards, values = [0.0, 3.0, 1.0, 2.0], [1.0, 2.0, 7.0, 4.0]
    together = gae(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor([2.0, 10.0, 4.0, 0.0], dtype=torch.float64),
        terminated_T=torch.tensor([False, False, False, True]),
        truncated_T=torch.tensor([False, True, False, False]),
        gamma=0.9,
        lam=0.5,
    ).tolist()
    first = one(rewards[:2], values[:2], 10.0, end="truncated", gamma=0.9, lam=0.5)
    second = one(rewards[2:], values[2:], 0.0, end="terminated", gamma=0.9, lam=0.5)
    assert together == pytest.approx([*first, *second])


def test_lambda_one_is_the_return_minus_the_value_and_zero_one_step() -> None:
    rewards, values = [1.0, 0.0, 2.0], [0.3, 0.6, 0.9]
    # returns with γ .5: 2; 0 + 1; 1 + .5
    assert one(rewards, values, 0.0, end="terminated", gamma=0.5, lam=1.0) == pytest.approx([1.2, 0.4, 1.1])
    # δ = (1 + .3 - .3, .45 - .6, 2 - .9)
    assert one(rewards, values, 0.0, end="terminated", gamma=0.5, lam=0.0) == pytest.approx([1.0, -0.15, 1.1])


def test_padding_after_the_end_changes_nothing() -> None:
    rewards = torch.tensor([[1.0, 2.0], [5.0, 0.0]])
    values = torch.tensor([[0.5, 0.5], [0.5, 0.0]])
    ends = torch.tensor([[False, True], [True, False]])
    padded = gae(
        rewards,
        values,
        torch.tensor([[0.5, 0.0], [0.0, 0.0]]),
        terminated_T=ends,
        truncated_T=torch.zeros_like(ends),
        gamma=1.0,
        lam=1.0,
    )
    # first: returns (3, 2) - .5; second: 5 - .5, then padding
    assert padded.tolist() == [[2.5, 1.5], [4.5, 0.0]]


def test_discounted_returns() -> None:
    # 2; 0 + .5 * 2; 1 + .5 * 1
    assert discounted_returns(torch.tensor([1.0, 0.0, 2.0]), gamma=0.5).tolist() == [1.5, 1.0, 2.0]
    assert discounted_returns(torch.tensor([[1.0, 1.0], [3.0, 0.0]]), gamma=1.0).tolist() == [[2.0, 1.0], [3.0, 0.0]]
    assert discounted_returns(torch.zeros(0), gamma=1.0).shape == (0,)


def test_whiten() -> None:
    # mean 2, variance (1 + 0 + 1) / 2 = 1
    assert whiten(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)
    assert whiten(torch.tensor([0.1, 0.1, 0.1])).tolist() == [0.0, 0.0, 0.0]
    assert whiten(torch.tensor([5.0])).tolist() == [0.0]
