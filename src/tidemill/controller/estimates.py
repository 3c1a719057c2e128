"""Estimates a worker's throughput by batch size from measurements."""

from __future__ import annotations

import math
from collections import deque

from tidemill.hardware.engine_profile import FLAT

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
