from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tidemill.algos.advantages import dr_grpo, grpo, has_signal, rloo

# Multiples of 1/64: sums, shifts and halvings of these are exact, so the tests compare formulas, not rounding.
rewards = st.lists(st.integers(-256, 256).map(lambda n: n / 64), min_size=2, max_size=16)
COMMON = settings(max_examples=80)


def advantages(values: list[float], valid: list[bool] | None = None) -> torch.Tensor:
    return grpo(torch.tensor(values), torch.tensor(valid or [True] * len(values)))


@COMMON
@given(rewards, st.integers(-64, 64))
def test_shift_invariance(values: list[float], shift: int) -> None:
    torch.testing.assert_close(advantages([v + shift for v in values]), advantages(values), atol=1e-6, rtol=1e-5)


@COMMON
@given(rewards, st.integers(1, 64))
def test_scale_only_changes_the_effect_of_the_floor(values: list[float], scale: int) -> None:
    spread = torch.tensor(values).std().item()
    assume(spread > 0)
    # c(R - mean) / (c std + f) = (R - mean) / (std + f / c)
    expected = advantages(values).double() * (spread + 1e-4) / (spread + 1e-4 / scale)
    torch.testing.assert_close(advantages([scale * v for v in values]).double(), expected, atol=1e-6, rtol=1e-5)


@COMMON
@given(rewards, st.randoms(use_true_random=False))
def test_permutation(values: list[float], random: object) -> None:
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    torch.testing.assert_close(advantages([values[i] for i in order]), advantages(values)[order], atol=1e-6, rtol=1e-5)


@COMMON
@given(rewards)
def test_the_sum_is_zero_and_the_order_is_kept(values: list[float]) -> None:
    result = advantages(values)
    assert abs(result.double().sum().item()) < 1e-4
    ranked = torch.tensor(values).argsort(stable=True)
    assert bool((result[ranked].diff() >= 0).all())
    assert has_signal(result) == (len(set(values)) > 1)


@COMMON
@given(rewards, st.data())
def test_invalid_samples_have_no_effect(values: list[float], data: st.DataObject) -> None:
    valid = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    mask = torch.tensor(valid)
    result = advantages(values, valid)
    kept = [value for value, ok in zip(values, valid, strict=True) if ok]
    torch.testing.assert_close(result[mask], advantages(kept) if len(kept) > 1 else torch.zeros(len(kept)))
    assert bool((result[~mask] == 0).all())


@COMMON
@given(rewards, st.integers(-64, 64), st.integers(1, 16))
def test_dr_grpo_and_rloo_are_shift_invariant_and_linear_in_scale(values: list[float], shift: int, scale: int) -> None:
    everyone = torch.ones(len(values), dtype=torch.bool)
    for function in (dr_grpo, rloo):
        plain = function(torch.tensor(values), everyone)
        moved = function(torch.tensor([scale * v + shift for v in values]), everyone)
        torch.testing.assert_close(moved, scale * plain, atol=1e-4, rtol=1e-5)
        assert abs(plain.double().sum().item()) < 1e-4


@COMMON
@given(rewards)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(values: list[float]) -> None:
    result = rloo(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))
    others = [sum(values[:i] + values[i + 1 :]) / (len(values) - 1) for i in range(len(values))]
    expected = torch.tensor([value - other for value, other in zip(values, others, strict=True)])
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
