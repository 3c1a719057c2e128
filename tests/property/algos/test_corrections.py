from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.algos.corrections import CORRECTIONS, Corrected, interpolated_proximal
from tidemill.algos.losses import Samples
from tidemill.config.algorithm import CORRECTION_LIMITS

tokens = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=20)
COMMON = settings(max_examples=40)


def corrected(kind: str, rows: list[tuple[float, int]], publishes: int = 3) -> Corrected:
    """For mu_step every publish has the same ratio."""
    log_ratio = torch.tensor([log for log, _ in rows], dtype=torch.float64)
    if kind == "mu_step":
        log_ratio = (log_ratio / publishes).expand(publishes, -1)
    limits: dict[str, Any] = CORRECTION_LIMITS[kind]._asdict()  # type: ignore[index]
    given = {name: value for name, value in limits.items() if value is not None}
    return CORRECTIONS[kind].function(log_ratio, Samples(torch.tensor([sample for _, sample in rows]), 4), **given)


@pytest.mark.parametrize("kind", CORRECTIONS)
@COMMON
@given(rows=tokens)
def test_weights_are_bounded_and_flags_are_consistent(kind: str, rows: list[tuple[float, int]]) -> None:
    result = corrected(kind, rows)
    high = CORRECTION_LIMITS[kind].high  # type: ignore[index]
    assert bool((result.weights_T >= 0).all())
    if high is not None:
        factors = 3 if kind == "mu_step" else 1
        assert bool((result.weights_T <= max(high, 1.0) ** factors).all())
    assert bool((result.weights_T[result.masked_T] == 0).all())
    assert not bool((result.truncated_T & result.masked_T).any())


@pytest.mark.parametrize("kind", CORRECTIONS)
@COMMON
@given(samples=st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_on_policy_every_weight_is_one(kind: str, samples: list[int]) -> None:
    result = corrected(kind, [(0.0, sample) for sample in samples])
    assert result.weights_T.tolist() == [1.0] * len(samples)
    assert not bool((result.truncated_T | result.masked_T).any())


@pytest.mark.parametrize("kind", CORRECTIONS)
@COMMON
@given(rows=tokens, random=st.randoms(use_true_random=False))
def test_permutation(kind: str, rows: list[tuple[float, int]], random: Any) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    one, other = corrected(kind, rows), corrected(kind, [rows[i] for i in order])
    torch.testing.assert_close(other.weights_T, one.weights_T[order])


@COMMON
@given(rows=tokens, publishes=st.integers(1, 4))
def test_mu_step_truncates_each_publish(rows: list[tuple[float, int]], publishes: int) -> None:
    ratio = torch.tensor([log for log, _ in rows], dtype=torch.float64).exp()
    high = CORRECTION_LIMITS["mu_step"].high
    assert high is not None
    result = corrected("mu_step", rows, publishes)
    torch.testing.assert_close(result.weights_T, ratio.clamp(max=high**publishes))
    assert bool((result.truncated_T | torch.isclose(result.weights_T, ratio)).all())


@COMMON
@given(
    rows=st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.integers(0, 9)), min_size=1, max_size=20),
    shift=st.floats(-3, 3),
)
def test_interpolated_proximal_approaches_the_trainer_with_lag(
    rows: list[tuple[float, float, int]], shift: float
) -> None:
    rollout, trainer = torch.tensor([row[:2] for row in rows], dtype=torch.float64).unbind(1)
    lags = torch.tensor([row[2] for row in rows])
    proximal = interpolated_proximal(rollout, trainer.requires_grad_(), lags)
    assert not proximal.requires_grad
    left, whole = (trainer - proximal).abs(), (trainer - rollout).abs()
    torch.testing.assert_close(left, whole / (lags + 1))
    torch.testing.assert_close((proximal - rollout).abs() + left, whole)
    assert bool((interpolated_proximal(rollout, trainer, lags + 1) - trainer).abs().le(left + 1e-12).all())
    torch.testing.assert_close(interpolated_proximal(rollout + shift, trainer + shift, lags), proximal + shift)
    torch.testing.assert_close(interpolated_proximal(rollout, trainer, torch.zeros_like(lags)), rollout)
