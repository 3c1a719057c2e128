"""Predicts completion lengths by a mixed model of their logarithms and its empirical residuals.

The logarithm y of a completion's length depends on the logarithm x of its prompt's length, and on the prompt:

    y = mean + slope (x - mean x) + effect of the prompt + residual

Mean and slope are those of the latest samples. A prompt's effect is the posterior mean of a random effect (empirical
Bayes: Robbins 1956): the sum of its samples' deviations, divided by their number + within / between, the ratio of the
variances. Products of deviations estimate these: of each sample with itself (between + within), and with earlier ones
of its prompt (between). Lengths in tokens are means over the latest standardized residuals, so that no shape of the
distribution is assumed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

PROMPTS = 8192
RESIDUALS = 1024
"""Number of prompts and of residuals kept, the latest ones."""
QUANTILES = 256
"""Quantiles of the residuals from which lengths are predicted."""

KEPT = 0.5 ** (1 / 2048)
"""Share of a sample's weight in mean, slope and variances that each later sample leaves: half after 2048 samples."""
KEPT_OF_PROMPT = 0.5 ** (1 / 16)
"""The same among the samples of a prompt: earlier epochs count less, as the policy changes."""

PRIOR_VARIANCE = 1.0
PRIOR_SHARE = 0.3
PRIOR_WEIGHT = 8.0
"""Assumed variance of y and share of it between prompts, with the weight of this many samples and pairs of samples."""
SHARES = (0.001, 0.95)
"""Limits of the estimated share."""
RIDGE = 8.0
"""Added to the sum of squares of x, so that few or similar prompts give no slope."""
PRIOR_RESIDUALS = tuple(NormalDist().inv_cdf((index + 0.5) / 16) for index in range(16))
"""Assumed residuals in standard deviations, until later ones replace them."""
PRIOR_LONGER = 0.5
"""Weight of an assumed longer length in a mean over longer lengths, each of which has weight 1."""

REFRESH = 64
"""Mean, slope, variances and quantiles are at most this many samples old, and 1/16 of all samples."""
LEVELS = 8
"""Steps of the variance of a prediction, from a known to a new prompt."""


@dataclass(slots=True)
class _Effect:
    """Weighted sum of the deviations of one prompt's samples, and their weight."""

    total: float = 0.0
    weight: float = 0.0


NO_EFFECT = _Effect()


class LengthModel:
    """Predicts the lengths of new and of started samples. Equal sequences of `observe` give equal predictions.

    Observing several lengths at once is the same as one after another. Memory is bounded; a prediction costs
    O(log QUANTILES + siblings).
    """

    def __init__(self) -> None:
        self._effects: OrderedDict[str, _Effect] = OrderedDict()  # least recently observed first
        self._seen = 0
        self._refresh_at = 1
        self._weight = self._mean_x = self._mean_y = self._xx = self._xy = 0.0
        self._squares = self._products = self._pairs = 0.0
        self._latest: deque[tuple[float, float]] = deque(maxlen=RESIDUALS)  # (residual + mean, its standard deviation)
        self._estimate: _Estimate | None = None

    def observe(self, prompt_id: str, prompt_tokens: int, lengths: Sequence[int]) -> None:
        """Add the lengths of finished samples of one prompt, in tokens."""
        effect = self._effects.pop(prompt_id, None) or _Effect()
        self._effects[prompt_id] = effect
        if len(self._effects) > PROMPTS:
            self._effects.popitem(last=False)
        x = math.log(max(prompt_tokens, 1))
        for length in lengths:
            self._add(effect, x, math.log(max(length, 1)))

    def expected(self, prompt_id: str, prompt_tokens: int, limit: int, siblings: Sequence[int] = ()) -> float:
        """Expected length of a new sample that ends at `limit` at the latest; see `expected_remaining`."""
        return self.expected_remaining(prompt_id, prompt_tokens, 0, limit, siblings)

    def expected_remaining(
        self, prompt_id: str, prompt_tokens: int, have: int, limit: int, siblings: Sequence[int] = ()
    ) -> float:
        """Expected remaining tokens of a sample that has `have`, in [1, max(1, limit - have)].

        The mean excess over `have` of the longer ones among the predicted lengths, cut at `limit`. An assumed one,
        uniform between both, makes it half of the rest if none is longer, and while nothing is known.

        Args:
            siblings: lengths of finished samples of its group that were not observed.
        """
        if have + 1 >= limit:
            return 1.0
        if (estimate := self._estimate) is None:
            lengths = [min(length, limit) for length in siblings if length > have]
            total = sum(lengths) + PRIOR_LONGER * (have + limit) / 2
            remaining = total / (len(lengths) + PRIOR_LONGER) - have
        else:
            trend = estimate.intercept + estimate.slope * math.log(prompt_tokens or 1)
            effect = self._effects.get(prompt_id, NO_EFFECT)
            total, weight = effect.total, effect.weight
            for length in siblings:
                total += math.log(max(length, 1)) - trend
                weight += 1.0
            known = weight + estimate.shrinkage
            scale = math.exp(trend + total / known)
            ratios = estimate.ratios(estimate.shrinkage / known)
            remaining = scale * ratios.mean_excess(have / scale, limit / scale)
        return min(max(remaining, 1.0), float(limit - have))

    def _add(self, effect: _Effect, x: float, y: float) -> None:
        adjusted = y - self._slope * (x - self._mean_x)
        deviation = adjusted - self._mean_y if self._seen else 0.0
        between, within = self._variances
        known = effect.weight + within / between
        self._latest.append((adjusted - effect.total / known, math.sqrt(within + within / known)))
        self._squares = self._squares * KEPT + deviation**2
        self._products = self._products * KEPT + deviation * effect.total
        self._pairs = self._pairs * KEPT + effect.weight
        self._regress(x, y)
        effect.total = effect.total * KEPT_OF_PROMPT + deviation
        effect.weight = effect.weight * KEPT_OF_PROMPT + 1.0
        self._seen += 1
        if self._seen >= self._refresh_at:
            self._refresh_at += min(REFRESH, 1 + self._seen // 16)
            intercept = self._mean_y - self._slope * self._mean_x
            self._estimate = _Estimate(intercept, self._slope, *self._variances, self._residuals())

    def _regress(self, x: float, y: float) -> None:
        """One step of Welford's algorithm, with weights that decay."""
        self._weight = self._weight * KEPT + 1.0
        ahead = x - self._mean_x
        self._mean_x += ahead / self._weight
        self._mean_y += (y - self._mean_y) / self._weight
        self._xx = self._xx * KEPT + ahead * (x - self._mean_x)
        self._xy = self._xy * KEPT + ahead * (y - self._mean_y)

    @property
    def _slope(self) -> float:
        return self._xy / (self._xx + RIDGE)

    @property
    def _variances(self) -> tuple[float, float]:
        """Between prompts, and within the samples of a prompt."""
        variance = (PRIOR_WEIGHT * PRIOR_VARIANCE + self._squares) / (PRIOR_WEIGHT + self._weight)
        between = (PRIOR_WEIGHT * PRIOR_VARIANCE * PRIOR_SHARE + self._products) / (PRIOR_WEIGHT + self._pairs)
        between = min(max(between, SHARES[0] * variance), SHARES[1] * variance)
        return between, variance - between

    def _residuals(self) -> list[float]:
        """From the current mean, so that one which moves, as lengths of one batch end in order, adds no spread."""
        residuals = [] if len(self._latest) == RESIDUALS else list(PRIOR_RESIDUALS)
        residuals += [(value - self._mean_y) / deviation for value, deviation in self._latest]
        residuals.sort()
        return residuals


class _Estimate:
    """The state of a model at one time.

    Args:
        between, within: variances.
        residuals: in standard deviations, ascending.
    """

    def __init__(self, intercept: float, slope: float, between: float, within: float, residuals: list[float]) -> None:
        self.intercept = intercept
        self.slope = slope
        self.shrinkage = within / between
        self._between = between
        self._within = within
        count = min(QUANTILES, len(residuals))
        self._quantiles = [residuals[(2 * index + 1) * len(residuals) // (2 * count)] for index in range(count)]
        self._prior_weight = PRIOR_LONGER * count / len(residuals)
        self._levels: dict[int, _Ratios] = {}

    def ratios(self, unknown: float) -> _Ratios:
        """Ratios of lengths to exp(predicted y).

        Args:
            unknown: variance of the prompt's effect given its samples, as a share of that between prompts.
        """
        level = round(unknown * LEVELS)
        if level not in self._levels:
            deviation = math.sqrt(self._within + self._between * level / LEVELS)
            values = [math.exp(deviation * quantile) for quantile in self._quantiles]
            self._levels[level] = _Ratios(values, self._prior_weight)
        return self._levels[level]


class _Ratios:
    """Ascending values of weight 1; an assumed one above any threshold has `prior_weight`."""

    def __init__(self, values: list[float], prior_weight: float) -> None:
        self._values = values
        self._sums = list(accumulate(values, initial=0.0))
        self._prior_weight = prior_weight

    def mean_excess(self, threshold: float, limit: float) -> float:
        """Mean of min(value, limit) - threshold over the values above the threshold."""
        first = bisect_right(self._values, threshold)
        last = bisect_right(self._values, limit, first)
        longer = len(self._values) - first
        total = self._sums[last] - self._sums[first] + limit * (first + longer - last)
        total += self._prior_weight * (threshold + limit) / 2
        return total / (longer + self._prior_weight) - threshold
