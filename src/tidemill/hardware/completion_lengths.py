"""Distributions of completion lengths: log-normal or empirical, as quantile functions.

To draw a length, draw a uniform share: equal shares give equal lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Protocol

from tidemill.core.errors import UserError
from tidemill.core.records import Record

GRID = 256
"""Quantiles used to compute means over a distribution."""
NORMAL = NormalDist()
MOST_SIGMA = 4.0
"""Largest spread accepted: one length in forty is then 2,500 times the median."""


class Lengths(Protocol):
    """A distribution of completion lengths in tokens, at least 1."""

    def quantile(self, share: float) -> int:
        """The quantile function; 0 < share < 1."""
        ...


class LogNormalLengths(Record):
    """Log-normal lengths cut at a limit, roughly as reasoning models produce."""

    median: float
    sigma: float  # of the logarithm; 0.8 makes the 95th percentile 3.7 times the median
    limit: int

    def quantile(self, share: float) -> int:
        tokens = self.median * math.exp(self.sigma * NORMAL.inv_cdf(share))
        return max(1, min(round(tokens), self.limit))


class EmpiricalLengths(Record):
    """The empirical distribution of observed lengths."""

    tokens: tuple[int, ...]  # sorted

    def quantile(self, share: float) -> int:
        return self.tokens[min(int(share * len(self.tokens)), len(self.tokens) - 1)]


def quantiles(lengths: Lengths, count: int = GRID) -> tuple[int, ...]:
    """Midpoints of `count` equally likely intervals, ascending."""
    return tuple(lengths.quantile((part + 0.5) / count) for part in range(count))


def mean_length(lengths: Lengths) -> float:
    return fmean(quantiles(lengths))


def log_normal_of_mean(mean: float, *, sigma: float, limit: int) -> LogNormalLengths:
    """Log-normal lengths with this mean after the cut.

    Raises:
        UserError: the mean exceeds the limit, or `sigma` is out of range.
    """
    if not 1 <= mean <= limit:
        what = f"a mean of {mean:g} tokens is impossible with a limit of {limit}"
        raise UserError(what, hint="the mean must be between 1 and the limit")
    if not 0 <= sigma <= MOST_SIGMA:
        what = f"sigma {sigma:g} is out of range"
        raise UserError(what, hint=f"0 means equal lengths, 0.8 is usual, {MOST_SIGMA:g} is the maximum")
    low, high = 0.0, float(limit) * math.exp(4 * sigma)  # at the upper bound almost every length is cut
    for _ in range(60):
        middle = (low + high) / 2
        found = mean_length(LogNormalLengths(median=middle, sigma=sigma, limit=limit))
        low, high = (middle, high) if found < mean else (low, middle)
    return LogNormalLengths(median=high, sigma=sigma, limit=limit)


def lengths_of(tokens: Sequence[int]) -> EmpiricalLengths:
    """The empirical distribution of `tokens`; lengths below 1 count as 1."""
    return EmpiricalLengths(tokens=tuple(sorted(max(1, each) for each in tokens)))


def lengths_of_run(run_dir: Path) -> EmpiricalLengths:
    """The lengths of all samples of a run directory; truncated samples count with the limit.

    Raises:
        UserError: the run has no samples.
    """
    from tidemill.telemetry.run_data import read_run_samples  # loads NumPy, which sizes of memory do not need

    tokens = [sample.length for sample in read_run_samples(run_dir) if sample.length]
    if not tokens:
        raise UserError("no samples found", where=str(run_dir), hint="name a run directory with samples/")
    return lengths_of(tokens)
