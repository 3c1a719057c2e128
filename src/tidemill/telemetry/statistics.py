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
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


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
    """Mean of values in [0, 1] with its 95 % interval over items.

    Wilson's interval if every value is 0 or 1, or if all values are equal, which makes every resample the same;
    otherwise a bootstrap.
    """
    if not shares:
        return Interval(math.nan, 0.0, 1.0)
    mean = math.fsum(shares) / len(shares)
    if set(shares) <= {0.0, 1.0} or min(shares) == max(shares):
        return Interval(mean, *wilson_interval(min(1.0, mean), len(shares)))
    return bootstrap_mean(shares)


def reward_interval(rewards: Sequence[float]) -> Interval:
    """Mean of rewards with its 95 % interval over items: Wilson's if every value is 0 or 1, otherwise a bootstrap."""
    return share_interval(rewards) if set(rewards) <= {0.0, 1.0} else bootstrap_mean(rewards)


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

    The interval of the difference is a bootstrap over items. It has no width, and no meaning, if all items changed by
    the same amount.
    """
    changes = [now - then for then, now in zip(before, after, strict=True)]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    return Paired(
        n=len(changes),
        before=math.fsum(before) / len(changes),
        after=math.fsum(after) / len(changes),
        difference=bootstrap_mean(changes),
        better=better,
        worse=worse,
        p_value=sign_test(better, worse),
    )


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
