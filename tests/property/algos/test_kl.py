from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.algos.kl import adapted_beta, approximate_kl, k3, kl_reward, mismatch, no_mismatch

logprobs = st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=24)
COMMON = settings(max_examples=80)


def columns(rows: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return one, other


@COMMON
@given(logprobs, st.floats(-3, 3))
def test_k3_is_never_negative_and_shift_invariant(rows: list[tuple[float, float]], shift: float) -> None:
    trainer, ref = columns(rows)
    penalty = k3(trainer, ref)
    assert bool((penalty >= 0).all())
    assert bool((k3(trainer, trainer) == 0).all())
    torch.testing.assert_close(k3(trainer + shift, ref + shift), penalty, atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(approximate_kl(ref, trainer), penalty)


@COMMON
@given(logprobs, st.integers(0, 24), st.randoms(use_true_random=False))
def test_mismatch_sums_do_not_depend_on_splits_and_order(
    rows: list[tuple[float, float]], cut: int, random: object
) -> None:
    rollout, trainer = columns(rows)
    whole = mismatch(rollout, trainer).reduce()
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    sums = no_mismatch()
    for part in (shuffled[:cut], shuffled[cut:]):
        if part:
            sums += mismatch(*columns(part))
    parts = sums.reduce()
    assert parts["ratio_max"] == whole["ratio_max"]
    for name in ("ratio_mean", "ratio_var", "effective_sample_size", "mismatch_kl"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-9)


@COMMON
@given(logprobs)
def test_mismatch_agrees_with_plain_formulas(rows: list[tuple[float, float]]) -> None:
    rollout, trainer = columns(rows)
    stats = mismatch(rollout, trainer).reduce()
    ratio = (trainer - rollout).exp()
    assert stats["ratio_mean"] == pytest.approx(ratio.mean().item())
    assert stats["ratio_var"] == pytest.approx(ratio.var(correction=0).item(), rel=1e-6, abs=1e-9)
    share = (ratio.sum() ** 2 / (len(rows) * ratio.square().sum())).item()
    assert stats["effective_sample_size"] == pytest.approx(share)
    assert 1 / len(rows) - 1e-9 <= stats["effective_sample_size"] <= 1 + 1e-9
    assert stats["mismatch_kl"] >= 0


@COMMON
@given(logprobs, st.floats(-3, 3))
def test_kl_reward_is_antisymmetric_and_shift_invariant(rows: list[tuple[float, float]], shift: float) -> None:
    rollout, ref = columns(rows)
    penalty = kl_reward(rollout, ref)
    torch.testing.assert_close(kl_reward(ref, rollout), -penalty)
    torch.testing.assert_close(kl_reward(rollout + shift, ref + shift), penalty)
    torch.testing.assert_close(k3(rollout, ref), penalty - 1 + (-penalty).exp())  # d = -penalty


@COMMON
@given(st.lists(st.tuples(st.floats(-4, 4), st.floats(-4, 4)), min_size=2, max_size=12))
def test_the_mean_of_kl_reward_under_the_policy_is_the_kl_divergence(rows: list[tuple[float, float]]) -> None:
    policy, ref = (logits.log_softmax(0) for logits in columns(rows))
    mean = (policy.exp() * kl_reward(policy, ref)).sum()
    torch.testing.assert_close(mean, torch.nn.functional.kl_div(ref, policy, log_target=True, reduction="sum"))
    torch.testing.assert_close(mean, (policy.exp() * k3(policy, ref)).sum())  # the other unbiased estimate


coefficients = st.floats(1e-3, 1.0)


@COMMON
@given(coefficients, st.floats(0, 5), coefficients, st.floats(0.1, 10), st.floats(0, 1))
def test_adapted_beta_changes_by_at_most_two_percent(
    beta: float, kl: float, target: float, scale: float, more: float
) -> None:
    now = adapted_beta(beta, kl, target)
    assert 0.98 * beta - 1e-12 <= now <= 1.02 * beta + 1e-12
    assert (now > beta) == (kl / target > 1) or now == pytest.approx(beta)
    assert adapted_beta(beta, target, target) == beta
    assert adapted_beta(beta, kl + more, target) >= now
    assert adapted_beta(scale * beta, kl, target) == pytest.approx(scale * now)
    assert adapted_beta(beta, scale * kl, scale * target) == pytest.approx(now)
