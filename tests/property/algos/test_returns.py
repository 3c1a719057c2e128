from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.algos.returns import discounted_returns, gae, whiten
from tidemill.trainer.critic import ValueSums

step = st.tuples(
    st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3), st.sampled_from(["", "", "terminated", "truncated"])
)
episodes = st.lists(step, min_size=1, max_size=12)
share = st.floats(0.1, 1)
COMMON = settings(max_examples=80)
Rows = list[tuple[float, float, float, str]]


def columns(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    numbers = torch.tensor([row[:3] for row in rows], dtype=torch.float64)
    ends = [row[3] for row in rows]
    terminated, truncated = (torch.tensor([end == kind for end in ends]) for kind in ("terminated", "truncated"))
    rewards, values, next_values = numbers.unbind(1)
    return rewards, values, next_values, terminated, truncated


def advantages(rows: Rows, gamma: float, lam: float) -> Tensor:
    rewards, values, next_values, terminated, truncated = columns(rows)
    return gae(rewards, values, next_values, terminated_T=terminated, truncated_T=truncated, gamma=gamma, lam=lam)


@COMMON
@given(episodes, share, share)
def test_gae_is_the_weighted_sum_of_one_step_errors(rows: Rows, gamma: float, lam: float) -> None:
    rewards, values, next_values, terminated, truncated = (column.tolist() for column in columns(rows))
    expected = []
    for start in range(len(rows)):
        total, weight = 0.0, 1.0
        for t in range(start, len(rows)):
            ahead = 0.0 if terminated[t] else gamma * next_values[t]
            total += weight * (rewards[t] + ahead - values[t])
            if terminated[t] or truncated[t]:
                break
            weight *= gamma * lam
        expected.append(total)
    torch.testing.assert_close(advantages(rows, gamma, lam), torch.tensor(expected, dtype=torch.float64))


@COMMON
@given(episodes, share, share, st.floats(0.1, 10))
def test_scale(rows: Rows, gamma: float, lam: float, scale: float) -> None:
    scaled: Rows = [(scale * r, scale * v, scale * n, end) for r, v, n, end in rows]
    torch.testing.assert_close(advantages(scaled, gamma, lam), scale * advantages(rows, gamma, lam))


@COMMON
@given(episodes, share)
def test_gae_without_values_and_lambda_one_is_the_discounted_return(rows: Rows, gamma: float) -> None:
    bare: Rows = [(reward, 0.0, 0.0, "") for reward, *_ in rows]
    rewards = torch.tensor([reward for reward, *_ in rows], dtype=torch.float64)
    torch.testing.assert_close(advantages(bare, gamma, 1.0), discounted_returns(rewards, gamma=gamma))


@COMMON
@given(
    st.lists(st.integers(-64, 64).map(lambda n: n / 16), min_size=2, max_size=20), st.integers(1, 8), st.integers(-9, 9)
)
def test_whitening_does_not_depend_on_shift_and_scale(values: list[float], scale: int, shift: int) -> None:
    plain = whiten(torch.tensor(values))
    torch.testing.assert_close(whiten(scale * torch.tensor(values) + shift), plain, atol=1e-4, rtol=1e-4)
    if len(set(values)) > 1:
        assert abs(float(plain.double().mean())) < 1e-5
        assert abs(float(plain.double().std()) - 1) < 1e-3


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """As a critic reports it; 0 if it is omitted because all returns are equal."""
    sums = ValueSums()
    sums.add(returns, values, torch.zeros(()), torch.zeros_like(returns))
    return sums.metrics(1.0).get("explained_variance", 0.0)


PAIRS = st.lists(st.tuples(*[st.integers(-64, 64).map(lambda n: n / 16)] * 2), min_size=2, max_size=20)


@COMMON
@given(PAIRS, st.integers(1, 8), st.integers(-9, 9), st.randoms(use_true_random=False))
def test_explained_variance_does_not_depend_on_shift_scale_and_order(
    rows: list[tuple[float, float]], scale: int, shift: int, random: Random
) -> None:
    values, returns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    explained = explained_variance(values, returns)
    assert explained <= 1.0
    if len(set(returns.tolist())) > 1:
        share = 1 - float((returns - values).var() / returns.var())
        assert explained == pytest.approx(share)
        assert explained_variance(returns + shift, returns) == pytest.approx(1.0)
        assert explained_variance(torch.full_like(returns, float(shift)), returns) == pytest.approx(0.0)
    else:
        assert explained == 0.0
    assert explained_variance(values + shift, returns) == pytest.approx(explained)
    assert explained_variance(scale * values, scale * returns) == pytest.approx(explained)
    random.shuffle(rows)
    assert explained_variance(*torch.tensor(rows, dtype=torch.float64).unbind(1)) == pytest.approx(explained)


@COMMON
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.lists(st.floats(-3, 3), min_size=12, max_size=12), share)
def test_discounted_returns_are_additive_and_causal(one: list[float], more: list[float], gamma: float) -> None:
    rewards = torch.tensor(one, dtype=torch.float64)
    other = torch.tensor(more[: len(one)], dtype=torch.float64)
    returns = discounted_returns(rewards, gamma=gamma)
    powers = gamma ** torch.arange(len(one), dtype=torch.float64)
    torch.testing.assert_close(returns[0], (powers * rewards).sum())
    torch.testing.assert_close(discounted_returns(rewards[1:], gamma=gamma), returns[1:])
    both = discounted_returns(rewards + other, gamma=gamma)
    torch.testing.assert_close(both, returns + discounted_returns(other, gamma=gamma))
