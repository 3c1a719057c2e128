"""Statistics by hand, and by counting all cases."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest

from tidemill.telemetry.statistics import (
    bootstrap_mean,
    distinct_n,
    few_items,
    length_figures,
    mean_interval,
    mean_pass_at_k,
    paired,
    pass_at_k,
    reward_interval,
    share_difference,
    share_interval,
    sign_test,
    wilson_interval,
)


def test_the_interval_of_half_of_ten() -> None:
    # z = 1.96, p = 0.5, n = 10: z²/n = 0.38416; centre (0.5 + 0.19208) / 1.38416 = 0.5;
    # half width 1.96 / 1.38416 * sqrt(0.025 + 0.009604) = 1.41602 * 0.186022 = 0.26341.
    assert wilson_interval(0.5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-4)
    assert wilson_interval(0.5, 0) == (0.0, 1.0)
    assert wilson_interval(0.0, 10)[0] == 0.0 and wilson_interval(1.0, 10)[1] == 1.0


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [
        (4, 1, 1, 0.25),  # one of four
        (4, 1, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (5, 2, 3, 0.9),  # 1 - C(3, 3) / C(5, 3) = 1 - 1 / 10
        (5, 3, 3, 1.0),  # three cannot all be wrong where only two are
        (8, 0, 8, 0.0),
    ],
)
def test_pass_at_k(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_share_of_all_choices_of_k() -> None:
    for n in range(1, 8):
        for correct in range(n + 1):
            right = [at < correct for at in range(n)]
            for k in range(1, n + 1):
                choices = [any(chosen) for chosen in combinations(right, k)]
                assert pass_at_k(n, correct, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    # Over all outcomes of 6 samples, each right with chance p, its mean is 1 - (1 - p)^k.
    p, n, k = 0.3, 6, 4
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - 0.7**4, abs=1e-12)


def test_pass_at_k_of_many_samples_is_exact() -> None:
    # 1 - C(9_999, 100) / C(10_000, 100) = 1 - 9_900 / 10_000
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, correct, k)


def test_the_mean_over_prompts() -> None:
    # pass@2 of 4 samples: none right 0, one right 0.5, all right 1.
    found = mean_pass_at_k([(4, 0), (4, 1), (4, 4)], 2)
    assert found.value == pytest.approx(0.5)
    assert 0 <= found.low < 0.5 < found.high <= 1


def test_one_sample_a_prompt_has_wilsons_interval() -> None:
    found = mean_pass_at_k([(1, 1)] * 5 + [(1, 0)] * 5, 1)
    assert found == (0.5, *wilson_interval(0.5, 10))


def test_equal_values_still_have_an_interval() -> None:
    assert share_interval([0.5] * 10) == (0.5, *wilson_interval(0.5, 10))
    assert share_interval([1.0] * 10)[1:] == wilson_interval(1.0, 10)
    assert share_interval([])[1:] == (0.0, 1.0)


@pytest.mark.parametrize(
    ("n", "right", "low", "high"),
    [
        # Published: R, prop.test(x, n, correct = FALSE), and binom::binom.wilson; to z = 1.959964.
        (3, 3, 0.43849, 1.0),  # n / (n + z²) = 3 / 6.84146
        (3, 0, 0.0, 0.56151),
        (20, 19, 0.76387, 0.99112),
        (64, 64, 0.94338, 1.0),
        (263, 81, 0.25533, 0.36621),  # Newcombe 1998, table I
        (148, 15, 0.06244, 0.16052),
    ],
)
def test_wilsons_interval_agrees_with_published_values(n: int, right: int, low: float, high: float) -> None:
    assert wilson_interval(right / n, n) == pytest.approx((low, high), abs=1e-4)
    assert share_interval([1.0] * right + [0.0] * (n - right))[1:] == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("values", [[0.9, 1.0, 1.0], [-2.0, 5.0], [0.5, 0.5, 0.6], [3.0] * 9 + [100.0]])
def test_no_interval_exceeds_the_values(values: list[float]) -> None:
    found = reward_interval(values)
    assert min(values) <= found.low < found.high <= max(values)


def test_equal_values_never_have_an_interval_without_width() -> None:
    for values in ([0.5] * 3, [1.5]):  # their range is not known
        assert reward_interval(values).figure == {"value": values[0], "low": None, "high": None}
    assert reward_interval([]).ends is None
    assert reward_interval([1.0] * 3) == (1.0, *wilson_interval(1.0, 3))
    # The range -1 to 1 is that of shares, scaled: 0 is half of it.
    low, high = wilson_interval(0.5, 10)
    assert mean_interval([0.0] * 10, within=(-1.0, 1.0)) == pytest.approx((0.0, 2 * low - 1, 2 * high - 1))


def test_the_difference_of_shares_of_the_same_items() -> None:
    # Agresti and Min 2005, n = 3, no change: centre 0, half 1.96 / 5 · sqrt(0.5 + 0.5) = 0.392.
    assert share_difference(3, 0, 0) == pytest.approx((0.0, -0.392, 0.392))
    # n = 10, 4 better, 1 worse: centre (4.5 - 1.5) / 12 = 0.25,
    # half 1.96 / 12 · sqrt(6 - 3² / 12) = 0.16333 · 2.29129 = 0.37424.
    assert share_difference(10, 4, 1) == pytest.approx((0.3, -0.12424, 0.62424), abs=1e-5)
    assert share_difference(2, 2, 0).high == 1.0
    assert paired([0, 0, 1], [0, 0, 1]).difference == share_difference(3, 0, 0)
    assert paired([0.25, 0.5], [0.75, 1.0]).difference.figure == {"value": 0.5, "low": None, "high": None}


def test_the_bootstrap_agrees_with_the_normal_interval_of_many() -> None:
    values = np.random.Generator(np.random.PCG64(5)).normal(2.0, 3.0, 900).tolist()
    found = bootstrap_mean(values)
    half = 1.96 * np.std(values, ddof=1) / 30  # sqrt(900)
    assert found.value == pytest.approx(np.mean(values))
    # The percentiles of 2,000 resamples are known to about 0.05 standard errors each.
    assert found.low == pytest.approx(found.value - half, abs=0.15 * half)
    assert found.high == pytest.approx(found.value + half, abs=0.15 * half)


def test_the_bootstrap_is_deterministic_in_any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [number**0.5 for number in range(20)]
    whole = bootstrap_mean(values)
    assert bootstrap_mean(values) == whole
    assert bootstrap_mean(values, seed=1) != whole
    monkeypatch.setattr("tidemill.telemetry.statistics.BLOCK_ITEMS", 40)
    in_blocks = bootstrap_mean(values)
    assert in_blocks == pytest.approx(whole, abs=0.15)
    assert all(math.isnan(figure) for figure in bootstrap_mean([]))


@pytest.mark.parametrize(
    ("better", "worse", "expected"),
    [
        (0, 0, 1.0),  # nothing changed
        (1, 0, 1.0),  # 2 · 1/2
        (5, 0, 0.0625),  # 2 / 2^5
        (1, 8, 20 / 512),  # 2 · (C(9, 0) + C(9, 1)) / 2^9
        (3, 3, 1.0),  # 2 · P(X <= 3) is above 1
    ],
)
def test_the_sign_test(better: int, worse: int, expected: float) -> None:
    assert sign_test(better, worse) == expected
    assert sign_test(worse, better) == expected


def test_the_sign_test_counts_all_outcomes_at_least_as_unequal() -> None:
    for n in range(1, 9):
        for better in range(n + 1):
            outcomes = [abs(2 * sum(signs) - n) for signs in product((0, 1), repeat=n)]
            as_unequal = sum(outcome >= abs(2 * better - n) for outcome in outcomes)
            assert sign_test(better, n - better) == pytest.approx(as_unequal / 2**n)


def test_the_sign_test_of_thousands_is_finite() -> None:
    assert sign_test(3000, 2000) < 1e-40
    assert sign_test(100_000, 0) == 0.0


def test_before_and_after() -> None:
    # Five prompts: two go from wrong to right, one from right to wrong.
    found = paired([0, 0, 1, 1, 0], [1, 1, 0, 1, 0])
    assert (found.n, found.before, found.after, found.better, found.worse) == (5, 0.4, 0.6, 2, 1)
    assert found.difference.value == pytest.approx(0.2)
    assert found.difference.low < 0.2 < found.difference.high
    assert found.p_value == 1.0  # 2 · (C(3, 0) + C(3, 1)) / 8 = 1


def test_paired_measurements_need_equal_lengths() -> None:
    with pytest.raises(ValueError):
        paired([1.0], [1.0, 0.0])


def test_distinct_n_grams() -> None:
    # 1-grams a b a c: 3 of 4 differ. 2-grams ab, ac: 2 of 2; the completion of one token has none.
    completions = [["a", "b"], ["a", "c"]]
    assert (distinct_n(completions, 1), distinct_n(completions, 2)) == (0.75, 1.0)
    # 2-grams of 1 1 1 2: 11, 11, 12.
    assert distinct_n([[1, 1, 1, 2], [7]], 2) == pytest.approx(2 / 3)
    assert math.isnan(distinct_n([[1], []], 2))


def test_lengths() -> None:
    # 95th percentile of 1, 2, 3, 10: at position 0.95 · 3 = 2.85, so 3 + 0.85 · 7 = 8.95.
    assert length_figures([10, 1, 3, 2]) == pytest.approx(
        {"mean": 4.0, "median": 2.5, "p95": 8.95, "min": 1.0, "max": 10.0}
    )
    assert length_figures([]) == {}


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, ""),
        # Wilson at one half: (1/2 ± 0.98 / sqrt(3.8416 + n)), here ± 0.3747
        (3, "75 percentage points wide (50 %: 13 % to 87 %); add rows (100 give 19 points)"),
        (20, ""),
    ],
)  # fmt: skip
def test_few_items_have_a_wide_interval(n: int, text: str) -> None:
    found = few_items(n, "prompt", "add rows")
    assert found.endswith(text) and bool(found) == bool(text)
