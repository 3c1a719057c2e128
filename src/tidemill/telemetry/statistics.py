"""Statistics of evaluations: intervals, pass@k, paired tests, diversity; each with the source of its formula."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from tidemill.core.formatting import counted, percent

LEVEL = 0.95
Z_95 = 1.96
RESAMPLES = 2000
RESAMPLE_SEED = 0
BLOCK_ITEMS = 1_000_000
"""Resampled values held at once."""


class Interval(NamedTuple):
    """A figure and its 95 % interval; both ends are NaN if the sample does not tell one."""

    value: float
    low: float
    high: float

    @property
    def ends(self) -> list[float] | None:
        """None if they are unknown."""
        return None if math.isnan(self.low) or math.isnan(self.high) else [self.low, self.high]

    @property
    def figure(self) -> dict[str, float | None]:
        """`value`, `low` and `high` for JSON, None for unknown ends."""
        low, high = self.ends or (None, None)
        return {"value": self.value, "low": low, "high": high}


class Paired(NamedTuple):
    """Two measurements of the same items."""

    n: int
    before: float  # mean
    after: float  # mean
    difference: Interval  # of the means, after minus before
    better: int  # items whose second value is higher
    worse: int
    p_value: float  # of the two-sided sign test


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share measured on `n` items (Wilson 1927); conservative for scores between 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    square = Z_95**2 / n
    centre = (share + square / 2) / (1 + square)
    half = Z_95 / (1 + square) * math.sqrt(share * (1 - share) / n + square / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


FEW, USUAL = 20, 100
"""Fewer items tell little: the interval of a share of one half is 40 percentage points wide with 20, 19 with 100."""


def few_items(n: int, items: str, cure: str) -> str:
    """The interval to expect of a share measured on `n` items; empty if they are enough, or none.

    Args:
        items: "held-out prompt".
        cure: "raise eval.prompts".
    """
    if not 0 < n < FEW:
        return ""
    low, high = wilson_interval(0.5, n)
    usual_low, usual_high = wilson_interval(0.5, USUAL)
    return (
        f"{counted(n, items)} can hardly tell models apart: the 95 % interval of an accuracy is "
        f"{100 * (high - low):.0f} percentage points wide (50 %: {percent(low)} to {percent(high)}); {cure} "
        f"({USUAL} give {100 * (usual_high - usual_low):.0f} points)"
    )


def normal_interval(mean: float, stderr: float) -> tuple[float, float]:
    """95 % interval of a mean with this standard error, by the normal approximation."""
    return mean - Z_95 * stderr, mean + Z_95 * stderr


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the probability that k of the n samples, drawn without replacement, include a
    correct one.

    An unbiased estimate of the probability that k new samples include a correct one (Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", eq. 1).

    Raises:
        ValueError: not 0 <= correct <= n, or not 1 <= k <= n.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"{correct} correct of {n} samples, k = {k}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> Interval:
    """pass@k over prompts, with the interval of `share_interval`.

    Args:
        counts: (samples, correct ones) of each prompt.
    """
    return share_interval([pass_at_k(n, correct, k) for n, correct in counts])


def share_interval(shares: Sequence[float]) -> Interval:
    """`mean_interval` of values in [0, 1]."""
    return mean_interval(shares, within=(0.0, 1.0))


def mean_interval(values: Sequence[float], *, within: tuple[float, float] | None = None) -> Interval:
    """Mean of values with its 95 % interval over items, never outside the range of the values.

    Wilson's interval, scaled to the range, if every value is an end of it, or if all values are equal: a few equal
    values do not prove that all others are equal, too. Otherwise a bootstrap. Equal values without a known range have
    no interval: how far others can be from them is not known.

    Args:
        within: the possible range, if it is known.
    """
    if not values:
        low, high = within or (math.nan, math.nan)
        return Interval(math.nan, low, high)
    mean = math.fsum(values) / len(values)
    if within is not None and (set(values) <= set(within) or min(values) == max(values)):
        lowest, width = within[0], within[1] - within[0]
        low, high = wilson_interval(min(1.0, max(0.0, (mean - lowest) / width)), len(values))
        return Interval(mean, lowest + width * low, lowest + width * high)
    if min(values) == max(values):
        return Interval(mean, math.nan, math.nan)
    return bootstrap_mean(values)


def reward_interval(rewards: Sequence[float]) -> Interval:
    """`mean_interval` of rewards, which are shares if each is 0 or 1. Otherwise weights and functions decide how low
    and how high a reward can be, even if it tells correctness."""
    return mean_interval(rewards, within=(0.0, 1.0) if rewards and set(rewards) <= {0.0, 1.0} else None)


def bootstrap_mean(values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = RESAMPLE_SEED) -> Interval:
    """Mean with the 2.5th and 97.5th percentiles of the means of resamples (Efron 1979); deterministic."""
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    items_N = np.asarray(values, dtype=np.float64)
    draw = np.random.Generator(np.random.PCG64(seed))
    rows = max(1, BLOCK_ITEMS // len(items_N))
    means_R = np.concatenate([
        items_N[draw.integers(len(items_N), size=(min(rows, resamples - done), len(items_N)))].mean(axis=1)
        for done in range(0, resamples, rows)
    ])  # fmt: skip
    low, high = np.quantile(means_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(items_N.mean()), float(low), float(high))


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact p-value of `better` against `worse` changes; ties do not count.

    min(1, 2 · P(X <= min)), X binomial with n = better + worse and p = 1/2. For correct and wrong answers to the same
    prompts this is McNemar's exact test (McNemar 1947; Conover, Practical Nonparametric Statistics, 3.4-3.5).
    """
    n = better + worse
    tail = sum(math.comb(n, at) for at in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << n))


def paired(before: Sequence[float], after: Sequence[float]) -> Paired:
    """Compare two measurements of the same items, in the same order; at least one item.

    The interval of the difference is `share_difference` if every value is 0 or 1, otherwise a bootstrap over items;
    there is none if all items changed by the same amount.
    """
    changes = [now - then for then, now in zip(before, after, strict=True)]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    binary = {*before, *after} <= {0.0, 1.0}
    return Paired(
        n=len(changes),
        before=math.fsum(before) / len(changes),
        after=math.fsum(after) / len(changes),
        difference=share_difference(len(changes), better, worse) if binary else mean_interval(changes),
        better=better,
        worse=worse,
        p_value=sign_test(better, worse),
    )


def share_difference(n: int, better: int, worse: int) -> Interval:
    """Difference of two shares of the same `n` items, of which `better` are only in the second and `worse` only in the
    first, with its 95 % interval: Wald's after adding half an item to each cell of the two-by-two table (Agresti and
    Min 2005, "Simple improved confidence intervals for comparing matched proportions")."""
    n_plus, better_plus, worse_plus = n + 2, better + 0.5, worse + 0.5
    centre = (better_plus - worse_plus) / n_plus
    half = Z_95 / n_plus * math.sqrt(better_plus + worse_plus - (better_plus - worse_plus) ** 2 / n_plus)
    return Interval((better - worse) / n, max(-1.0, centre - half), min(1.0, centre + half))


def distinct_n(completions: Sequence[Sequence[Hashable]], n: int) -> float:
    """Distinct n-grams as a share of all n-grams of the completions (Li et al. 2016, "A Diversity-Promoting Objective
    Function"); NaN if no completion has n tokens.

    It falls with the number of completions, so only equal numbers are comparable.
    """
    grams = [tuple(each[at : at + n]) for each in completions for at in range(len(each) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


def length_figures(lengths: Sequence[int]) -> dict[str, float]:
    """Mean, median, 95th percentile (linear interpolation), minimum and maximum; empty for no lengths."""
    if not lengths:
        return {}
    median, p95 = np.quantile(lengths, [0.5, 0.95])
    return {
        "mean": sum(lengths) / len(lengths),
        "median": float(median),
        "p95": float(p95),
        "min": float(min(lengths)),
        "max": float(max(lengths)),
    }
