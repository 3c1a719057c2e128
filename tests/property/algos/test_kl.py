from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.algos.kl import approximate_kl, k3, mismatch, no_mismatch

logprobs = st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=24)
COMMON = settings(max_examples=80)


def columns(rows: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return one, other


@COMMON
@given(logprobs, st.floats(-3, 3))
def test_k3_is_never_negative_and_zero_only_for_equals(rows: list[tuple[float, float]], shift: float) -> None:
    trainer, ref = columns(rows)
    penalty = k3(trainer, ref)
    assert bool((penalty >= 0).all())
    assert bool((k3(trainer, trainer) == 0).all())
    torch.testing.assert_close(k3(trainer + shift, ref + shift), penalty, atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(approximate_kl(ref, trainer), penalty)


@COMMON
@given(logprobs, st.integers(0, 24), st.randoms(use_true_random=False))
def test_mismatch_sums_are_the_same_however_cut_and_ordered(
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
    assert parts.tokens == whole.tokens
    assert parts.ratio_max == whole.ratio_max
    for name in ("ratio_mean", "ratio_variance", "effective_sample_size", "mismatch_kl"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-6, abs=1e-9)


@COMMON
@given(logprobs)
def test_mismatch_agrees_with_plain_formulas_and_its_bounds(rows: list[tuple[float, float]]) -> None:
    rollout, trainer = columns(rows)
    stats = mismatch(rollout, trainer).reduce()
    ratio = (trainer - rollout).exp()
    assert stats.ratio_mean == pytest.approx(ratio.mean().item())
    assert stats.ratio_variance == pytest.approx(ratio.var(correction=0).item(), rel=1e-6, abs=1e-9)
    share = (ratio.sum() ** 2 / (len(rows) * ratio.square().sum())).item()
    assert stats.effective_sample_size == pytest.approx(share)
    assert 1 / len(rows) - 1e-9 <= stats.effective_sample_size <= 1 + 1e-9
    assert stats.mismatch_kl >= 0
