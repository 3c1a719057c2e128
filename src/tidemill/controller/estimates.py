"""Estimates from measurements: completion lengths, and a worker's throughput by batch size."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from itertools import accumulate

from tidemill.hardware.engine_profile import FLAT

ENOUGH_LENGTHS = 4
"""Minimum number of longer completions from which a sample's remaining length is estimated."""

PER_PROMPT = 16
OVERALL = 1024
PROMPTS = 8192
"""Number of latest lengths kept per prompt and overall, and of prompts kept."""


class LengthEstimator:
    """Estimates completion lengths from finished samples; memory is bounded."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, _Lengths] = OrderedDict()  # least recently used first
        self._all = _Lengths(OVERALL)

    def observe(self, prompt_id: str, length: int) -> None:
        """Add the length of a finished sample."""
        self._all.add(length)
        lengths = self._prompts.pop(prompt_id, None) or _Lengths(PER_PROMPT)
        lengths.add(length)
        self._prompts[prompt_id] = lengths
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)

    def expected(self, prompt_id: str, limit: int) -> float:
        """Mean length of the prompt's samples, else of all samples, else half of `limit`."""
        for lengths in (self._prompts.get(prompt_id), self._all):
            if lengths and lengths.count:
                return lengths.mean
        return limit / 2

    def expected_remaining(self, prompt_id: str, have: int, limit: int) -> float:
        """Expected remaining tokens of a sample that has `have`, in [1, max(1, limit - have)].

        The mean excess over `have` of the completions longer than `have`: the prompt's if there are at least
        `ENOUGH_LENGTHS`, else of all prompts. Without enough of them: the expected length minus `have`, or half of the
        rest up to `limit` for a sample beyond the expected length.
        """
        for lengths in (self._prompts.get(prompt_id), self._all):
            if lengths and lengths.longer_than(have) >= ENOUGH_LENGTHS:
                remaining = lengths.mean_beyond(have)
                break
        else:
            expected = self.expected(prompt_id, limit)
            remaining = expected - have if expected > have else (limit - have) / 2
        return max(min(remaining, float(limit - have)), 1.0)


class _Lengths:
    """The latest `keep` lengths, sorted; queries cost O(log n) between additions."""

    def __init__(self, keep: int) -> None:
        self._newest: deque[int] = deque(maxlen=keep)
        self._sorted: list[int] = []
        self._sums: list[int] = []  # _sums[i] = sum(_sorted[:i]); empty when outdated

    def add(self, length: int) -> None:
        if len(self._newest) == self._newest.maxlen:
            del self._sorted[bisect_right(self._sorted, self._newest[0]) - 1]
        self._newest.append(length)
        insort(self._sorted, length)
        self._sums = []

    @property
    def count(self) -> int:
        return len(self._sorted)

    @property
    def mean(self) -> float:
        return self._sum_from(0) / self.count

    def longer_than(self, have: int) -> int:
        return self.count - bisect_right(self._sorted, have)

    def mean_beyond(self, have: int) -> float:
        """Mean excess of the lengths above `have`, of which there must be at least one."""
        first = bisect_right(self._sorted, have)
        return self._sum_from(first) / (self.count - first) - have

    def _sum_from(self, first: int) -> int:
        if not self._sums:
            self._sums = list(accumulate(self._sorted, initial=0))
        return self._sums[-1] - self._sums[first]


PER_OCTAVE = 4
"""Batch sizes are binned by factors of 2 ** (1 / PER_OCTAVE)."""

KEPT = 32
"""Observations kept per bin."""

HALF_LIFE = 512
"""Number of later observations after which an observation's weight is halved."""

ENOUGH_WEIGHT = 2.0
"""Minimum total weight of a bin's observations, each having weight 1 when new."""

SPAN = 2.0
"""Minimum ratio of the largest to the smallest batch size observed, below which no plateau is estimated."""


class ThroughputProfile:
    """Throughput by batch size; a median per bin makes it robust to shortened or disturbed report intervals."""

    def __init__(self) -> None:
        self._seen = 0
        self._sizes: dict[int, deque[tuple[int, int, float]]] = {}  # (serial number, running, tokens/s)

    def observe(self, running: int, tokens_per_s: float) -> None:
        """Add one report interval of a worker: concurrent samples and total throughput. Idle intervals are ignored."""
        if running <= 0 or not (0 < tokens_per_s < math.inf):
            return
        self._seen += 1
        size = round(PER_OCTAVE * math.log2(running))
        self._sizes.setdefault(size, deque(maxlen=KEPT)).append((self._seen, running, tokens_per_s))

    def plateau(self, default: int) -> int:
        """The smallest batch size with at least `FLAT` times the best throughput; `default` until known."""
        curve = self._curve()
        if not curve or curve[-1][0] < SPAN * curve[0][0]:
            return default
        best = max(rate for _, rate in curve)
        return next(running for running, rate in curve if rate >= FLAT * best)

    @property
    def best_tokens_per_s(self) -> float:
        """Best throughput of one worker at any batch size; 0 until known."""
        return max((rate for _, rate in self._curve()), default=0.0)

    def _curve(self) -> list[tuple[int, float]]:
        """Weighted medians of batch size and throughput of each bin with enough weight."""
        curve = []
        for _, rows in sorted(self._sizes.items()):
            weights = [0.5 ** ((self._seen - serial) / HALF_LIFE) for serial, _, _ in rows]
            if sum(weights) >= ENOUGH_WEIGHT:
                running = _median([(float(size), weight) for (_, size, _), weight in zip(rows, weights, strict=True)])
                rate = _median([(rate, weight) for (_, _, rate), weight in zip(rows, weights, strict=True)])
                curve.append((int(running), rate))
        return curve


def _median(weighted: list[tuple[float, float]]) -> float:
    """Weighted median."""
    half, reached = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        reached += weight
        if reached >= half:
            return value
    raise ValueError("no values")
