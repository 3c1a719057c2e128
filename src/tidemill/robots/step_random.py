"""Random numbers of control steps: a function of the episode's seed, the step and the column, whatever else is drawn.

Each is splitmix64 (Steele, Lea and Flood 2014) at a place of its sequence, so that a world draws the same noise and
pushes in any chunk, next to any other worlds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.robots.task import Floats, Integers

Words = npt.NDArray[np.uint64]
GAMMA = np.uint64(0x9E3779B97F4A7C15)  # the odd step of splitmix64's sequence
MIXING = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
LAST_SHIFT, UNUSED_BITS, UNIT = np.uint64(31), np.uint64(11), 2.0**-53


class StepRandom:
    """Those of one control step. Every call draws new ones.

    Args:
        seeds: of the episodes, [N].
        steps: the number of the step in each episode, [N].
    """

    def __init__(self, seeds: Integers, steps: Integers) -> None:
        self._seeds, self._steps, self._drawn = seeds, steps, 0

    def uniform(self, low: Any, high: Any, width: int) -> Floats:
        """float64 [N, width]."""
        first = _mixed(self._seeds.astype(np.uint64) + GAMMA * self._steps.astype(np.uint64))
        columns = GAMMA * np.arange(self._drawn + 1, self._drawn + width + 1, dtype=np.uint64)
        self._drawn += width
        unit = (_mixed(first[:, None] + columns) >> UNUSED_BITS) * UNIT  # in [0, 1)
        return np.asarray(low + (high - low) * unit)

    def normal(self, width: int) -> Floats:
        """float64 [N, width], standard normal, by the transform of Box and Muller."""
        radius, angle = np.split(self.uniform(0.0, 1.0, 2 * width), 2, axis=1)
        return np.asarray(np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle))


def _mixed(words: Words) -> Words:
    for shift, factor in MIXING:
        words = (words ^ (words >> np.uint64(shift))) * factor
    return words ^ (words >> LAST_SHIFT)
