"""Shuffling as arithmetic: a position names an example, so that nothing about data order is saved but a number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tidemill.envs.text.content import hash_number


class EpochOrder:
    """Which examples a step takes: step s the positions [(s-1)·B, s·B), position p being in epoch p // N.

    Every epoch is a permutation of all N examples that is a function of seed, epoch and their ids, whatever order they
    are listed in. With N ≥ 2B no batch holds an example twice, also where it straddles two epochs; in a smaller set it
    may, under different epochs.

    Args:
        ids: the examples' names, all different.
        batch: B, examples a step.
    """

    def __init__(self, ids: Sequence[str], *, batch: int, seed: int) -> None:
        self._ids, self._batch, self._seed = ids, batch, seed
        self._drawn = lru_cache(maxsize=3)(self._draw)
        self._order = lru_cache(maxsize=2)(self._without_straddling_repeats)

    def batch(self, step: int) -> list[tuple[int, int]]:
        """The (epoch, index into `ids`) pairs of 1-based `step`."""
        first = (step - 1) * self._batch
        places = [divmod(position, len(self._ids)) for position in range(first, first + self._batch)]
        return [(epoch, self._order(epoch)[place]) for epoch, place in places]

    def _draw(self, epoch: int) -> list[int]:
        return sorted(
            range(len(self._ids)), key=lambda index: hash_number("epoch", self._seed, epoch, self._ids[index])
        )

    def _without_straddling_repeats(self, epoch: int) -> list[int]:
        drawn, carried = self._drawn(epoch), (epoch * len(self._ids)) % self._batch
        if not epoch or not carried or len(drawn) < 2 * self._batch:
            return drawn
        # The last B places stay as drawn: so the next epoch can look at them without knowing what was moved here.
        movable, fixed = drawn[: -self._batch], drawn[-self._batch :]
        just_seen = set(self._drawn(epoch - 1)[-carried:])
        return sorted(movable, key=lambda index: index in just_seen) + fixed
