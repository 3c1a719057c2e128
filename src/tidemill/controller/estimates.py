"""Estimates from what was measured: completion lengths, and the batch size beyond which a worker gets no faster."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from itertools import accumulate

from tidemill.hardware.engine_profile import FLAT

ENOUGH_LENGTHS = 4
"""Completions longer than what a sample has already, from which its end is estimated."""

PER_PROMPT = 16
OVERALL = 1024
PROMPTS = 8192
"""What is remembered: the newest lengths of each prompt and of all, and the prompts last seen."""


class LengthEstimator:
    """Learns from finished samples, of this batch and earlier ones; memory is bounded."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, _Lengths] = OrderedDict()  # the last seen prompt last
        self._all = _Lengths(OVERALL)

    def observe(self, prompt_id: str, length: int) -> None:
        """A sample finished with so many tokens."""
        self._all.add(length)
        lengths = self._prompts.pop(prompt_id, None) or _Lengths(PER_PROMPT)
        lengths.add(length)
        self._prompts[prompt_id] = lengths
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)

    def expected(self, prompt_id: str, limit: int) -> float:
        """Mean length of the prompt's samples; unseen: of all prompts'; nothing seen: half of `limit`."""
        for lengths in (self._prompts.get(prompt_id), self._all):
            if lengths and lengths.count:
                return lengths.mean
        return limit / 2

    def expected_remaining(self, prompt_id: str, have: int, limit: int) -> float:
        """Tokens still to come of a sample that has `have` and did not end there; in [1, limit - have], at least 1.

        The mean of what completions longer than `have` had beyond it: the prompt's own if `ENOUGH` of them are known,
        else all prompts'. Too few: what the expected length leaves; and for a sample that is beyond even that, half of
        what `limit` leaves.
        """
        remaining = self._residual(prompt_id, have)
        if remaining is None:
            expected = self.expected(prompt_id, limit)
            remaining = expected - have if expected > have else (limit - have) / 2
        return max(min(remaining, float(limit - have)), 1.0)

    def _residual(self, prompt_id: str, have: int) -> float | None:
        for lengths in (self._prompts.get(prompt_id), self._all):
            if lengths and lengths.longer_than(have) >= ENOUGH_LENGTHS:
                return lengths.mean_beyond(have)
        return None


class _Lengths:
    """The newest so many lengths, sorted; questions cost O(log n) while none is added."""

    def __init__(self, keep: int) -> None:
        self._newest: deque[int] = deque(maxlen=keep)
        self._sorted: list[int] = []
        self._sums: list[int] = []  # _sums[i]: of _sorted[:i]; empty when out of date

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
        """What the lengths above `have` have beyond it, on average; there must be one."""
        first = bisect_right(self._sorted, have)
        return self._sum_from(first) / (self.count - first) - have

    def _sum_from(self, first: int) -> int:
        if not self._sums:
            self._sums = list(accumulate(self._sorted, initial=0))
        return self._sums[-1] - self._sums[first]


PER_OCTAVE = 4
"""Batch sizes are told apart up to a factor of 2 ** (1 / PER_OCTAVE)."""

KEPT = 32
"""Observations remembered of each size."""

HALF_LIFE = 512
"""After so many later observations, of whatever size, one counts half."""

ENOUGH_WEIGHT = 2.0
"""Weight of a size's observations (1 each when fresh) below which nothing is concluded from them."""

SPAN = 2.0
"""Between the smallest and the largest size known there must be this factor before there is a curve."""


class ThroughputProfile:
    """Throughput by batch size. A median per size makes it robust to ticks that were cut short or disturbed."""

    def __init__(self) -> None:
        self._seen = 0
        self._sizes: dict[int, deque[tuple[int, int, float]]] = {}  # (serial number, running, tokens/s)

    def observe(self, running: int, tokens_per_s: float) -> None:
        """One worker's tick: samples it decoded at once, and how fast in all. Idle ticks are ignored."""
        if running <= 0 or not (0 < tokens_per_s < math.inf):
            return
        self._seen += 1
        size = round(PER_OCTAVE * math.log2(running))
        self._sizes.setdefault(size, deque(maxlen=KEPT)).append((self._seen, running, tokens_per_s))

    def plateau(self, default: int) -> int:
        """The smallest batch size whose throughput is at least `FLAT` of the best; `default` until that is known."""
        curve = self._curve()
        if not curve or curve[-1][0] < SPAN * curve[0][0]:
            return default
        best = max(rate for _, rate in curve)
        return next(running for running, rate in curve if rate >= FLAT * best)

    @property
    def best_tokens_per_s(self) -> float:
        """Of one worker, at whatever batch size; 0 until it is known."""
        return max((rate for _, rate in self._curve()), default=0.0)

    def _curve(self) -> list[tuple[int, float]]:
        return [point for _, rows in sorted(self._sizes.items()) if (point := self._point(rows))]

    def _point(self, rows: deque[tuple[int, int, float]]) -> tuple[int, float] | None:
        """A size's typical number of samples and throughput."""
        weights = [0.5 ** ((self._seen - serial) / HALF_LIFE) for serial, _, _ in rows]
        if sum(weights) < ENOUGH_WEIGHT:
            return None
        running = _median([(float(running), weight) for (_, running, _), weight in zip(rows, weights, strict=True)])
        return int(running), _median([(rate, weight) for (_, _, rate), weight in zip(rows, weights, strict=True)])


def _median(weighted: list[tuple[float, float]]) -> float:
    """The value at which half of the weight is reached."""
    half, reached = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        reached += weight
        if reached >= half:
            return value
    raise ValueError("no values")
