"""What holds for any counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.telemetry.statistics import distinct_n, paired, pass_at_k, share_interval, sign_test

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@given(n=st.integers(1, 40), data=st.data())
def test_pass_at_k_rises_with_k_and_correct_samples(n: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, correct, k)
    assert 0 <= value <= 1
    assert pass_at_k(n, correct, 1) == pytest.approx(correct / n)
    if k < n:
        assert pass_at_k(n, correct, k + 1) >= value
    if correct < n:
        assert pass_at_k(n, correct + 1, k) >= value


@given(shares=SHARES)
def test_the_interval_contains_the_mean_and_stays_in_range(shares: list[float]) -> None:
    found = share_interval(shares)
    assert found.value == pytest.approx(math.fsum(shares) / len(shares))
    assert -1e-12 <= found.low <= found.value + 1e-9
    assert found.value - 1e-9 <= found.high <= 1 + 1e-12


@given(before=SHARES, data=st.data())
def test_swapping_the_models_swaps_the_counts_and_keeps_the_p_value(before: list[float], data: st.DataObject) -> None:
    after = data.draw(st.lists(st.floats(0, 1), min_size=len(before), max_size=len(before)))
    one, other = paired(before, after), paired(after, before)
    assert (one.better, one.worse, one.p_value) == (other.worse, other.better, other.p_value)
    assert one.difference.value == pytest.approx(-other.difference.value)
    assert one.better + one.worse + sum(x == y for x, y in zip(before, after, strict=True)) == one.n


@given(better=st.integers(0, 60), worse=st.integers(0, 60))
def test_p_values_are_probabilities_and_fall_as_counts_diverge(better: int, worse: int) -> None:
    value = sign_test(better, worse)
    assert 0 < value <= 1
    if better >= worse:
        assert sign_test(better + 1, worse) <= value


@given(completions=st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6), n=st.integers(1, 3))
def test_distinct_n_is_invariant_to_order_and_token_names(completions: list[list[int]], n: int) -> None:
    value = distinct_n(completions, n)
    renamed = [[f"token {token}" for token in each] for each in completions[::-1]]
    assert math.isnan(value) or 0 < value <= 1
    assert distinct_n(renamed, n) == value or (math.isnan(value) and math.isnan(distinct_n(renamed, n)))
    if not math.isnan(value):
        assert distinct_n(completions * 2, n) == pytest.approx(value / 2)
