"""From which batch size on a worker gets no faster: measured while it works."""

from __future__ import annotations

import math
from collections import deque

from tidemill.sim.profiles.engine import FLAT

PER_OCTAVE = 4
"""Batch sizes are told apart up to a factor of 2 ** (1 / PER_OCTAVE)."""

KEPT = 32
"""Observations remembered of each size."""

HALF_LIFE = 512
"""After so many later observations, of whatever size, one counts half."""

ENOUGH = 2.0
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
        if sum(weights) < ENOUGH:
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
