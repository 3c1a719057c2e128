"""How long completions are: fixed, log-normal, or as a run's were. A length is a function of a share of one.

Whoever needs a random length draws the share: equal shares, equal lengths, whatever else is random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Protocol

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import read_samples

GRID = 256
"""Quantiles that stand for a distribution where a mean over it is wanted."""
NORMAL = NormalDist()
MOST_SIGMA = 4.0
"""One in forty is then 2,500 times the median."""


class Lengths(Protocol):
    """Tokens of a completion, at least 1."""

    def quantile(self, share: float) -> int:
        """The length that this share of all completions does not exceed; 0 < share < 1."""
        ...


class LogNormalLengths(Record):
    """Many short ones and a few long ones, cut at a limit: what reasoning models write looks so, from afar."""

    median: float
    sigma: float  # of the logarithm; 0.8 makes the 95th percentile 3.7 times the median
    limit: int

    def quantile(self, share: float) -> int:
        tokens = self.median * math.exp(self.sigma * NORMAL.inv_cdf(share))
        return max(1, min(round(tokens), self.limit))


class EmpiricalLengths(Record):
    """As often as they were seen."""

    tokens: tuple[int, ...]  # rising

    def quantile(self, share: float) -> int:
        return self.tokens[min(int(share * len(self.tokens)), len(self.tokens) - 1)]


def quantiles(lengths: Lengths, count: int = GRID) -> tuple[int, ...]:
    """The middles of `count` equally likely parts, rising."""
    return tuple(lengths.quantile((part + 0.5) / count) for part in range(count))


def mean_length(lengths: Lengths) -> float:
    return fmean(quantiles(lengths))


def log_normal_of_mean(mean: float, *, sigma: float, limit: int) -> LogNormalLengths:
    """With this mean after the cut.

    Raises:
        UserError: it cannot be, the limit being below it; or the spread cannot.
    """
    if not 1 <= mean <= limit:
        what = f"a mean of {mean:g} tokens does not go with a limit of {limit}"
        raise UserError(what, hint="the mean is at least 1 and at most the limit")
    if not 0 <= sigma <= MOST_SIGMA:
        what = f"sigma {sigma:g} is no spread of lengths"
        raise UserError(what, hint=f"0 makes all alike, 0.8 is usual, {MOST_SIGMA:g} is the most")
    low, high = 0.0, float(limit) * math.exp(4 * sigma)  # at the high end almost everything is cut
    for _ in range(60):
        middle = (low + high) / 2
        found = mean_length(LogNormalLengths(median=middle, sigma=sigma, limit=limit))
        low, high = (middle, high) if found < mean else (low, middle)
    return LogNormalLengths(median=high, sigma=sigma, limit=limit)


def lengths_of(tokens: Sequence[int]) -> EmpiricalLengths:
    """
    Args:
        tokens: at least one.
    """
    return EmpiricalLengths(tokens=tuple(sorted(max(1, each) for each in tokens)))


def lengths_of_run(run_dir: Path) -> EmpiricalLengths:
    """Of all samples a run has written; those cut at its limit are as long as the limit, however long they would be.

    Raises:
        UserError: it has none.
    """
    files = [path for _, _, path in RunDirectory(run_dir).sample_files()] if run_dir.is_dir() else [run_dir]
    tokens = [sample.length for file in files for sample in read_samples(file) if sample.length]
    if not tokens:
        raise UserError(
            "no samples to take lengths from", where=str(run_dir), hint="name a run directory with samples/"
        )
    return lengths_of(tokens)
