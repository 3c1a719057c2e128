"""Which examples each optimizer step learns from: a pure function of the data, the seed and the step."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tidemill.models.token_tree import Tokens, common_prefix

ItemT = TypeVar("ItemT")
Sequences = Callable[[ItemT], Sequence[Tokens]]
"""The token sequences (int32 [T] each) that an example is made of."""


class TreeSize:
    """Nodes of the tree of sequences added one by one, without building it."""

    def __init__(self) -> None:
        self.nodes = 0
        self._keys: list[bytes] = []  # big-endian, so that bytes sort as token ids do
        self._sequences: list[Tokens] = []

    def growth(self, sequences: Sequence[Tokens]) -> int:
        """Nodes that these would add together."""
        twin = TreeSize()
        added = 0
        for sequence in sequences:
            shared = max(self._shared(sequence), twin._shared(sequence))
            twin.add([sequence])
            added += len(sequence) - shared
        return added

    def add(self, sequences: Sequence[Tokens]) -> None:
        for sequence in sequences:
            self.nodes += len(sequence) - self._shared(sequence)
            key = sequence.astype(">i4").tobytes()
            at = bisect.bisect_left(self._keys, key)
            self._keys.insert(at, key)
            self._sequences.insert(at, sequence)

    def _shared(self, sequence: Tokens) -> int:
        """The longest prefix that is there already: one of its neighbours in sorted order has it."""
        at = bisect.bisect_left(self._keys, sequence.astype(">i4").tobytes())
        return max((common_prefix(sequence, each) for each in self._sequences[max(at - 1, 0) : at + 1]), default=0)


def split_by_tokens(examples: Sequence[ItemT], sequences: Sequences[ItemT], budget: int) -> list[list[ItemT]]:
    """Consecutive runs of examples, each of at most `budget` packed tokens (or a single example)."""
    runs: list[list[ItemT]] = []
    size = TreeSize()
    for example in examples:
        parts = sequences(example)
        if not runs or size.nodes + size.growth(parts) > budget:
            runs.append([])
            size = TreeSize()
        runs[-1].append(example)
        size.add(parts)
    return runs


class Minibatches(Generic[ItemT]):
    """The minibatch of every step. Each epoch has its own order and is cut anew.

    Args:
        name: what an example is called for ever; with the seed and the epoch it decides the order.
        budget: packed tokens of a minibatch.
        epochs: passes over the examples; 0 for as many as `steps` need.
        steps: the number of minibatches, where epochs do not say it.
    """

    def __init__(
        self,
        examples: Sequence[ItemT],
        sequences: Sequences[ItemT],
        *,
        name: Callable[[ItemT], str],
        seed: int,
        budget: int,
        epochs: int,
        steps: int,
    ) -> None:
        self._examples, self._sequences, self._name = examples, sequences, name
        self._seed, self._budget = seed, budget
        self._ends: list[int] = []  # the last step of each epoch seen
        self._epoch, self._runs = -1, list[list[ItemT]]()
        for epoch in range(epochs):
            self._look_at(epoch)
        self.total = self._ends[-1] if epochs else steps

    def at(self, step: int) -> tuple[int, list[ItemT]]:
        """(epoch from 0, examples) of a 1-based step."""
        while not self._ends or self._ends[-1] < step:
            self._look_at(len(self._ends))
        epoch = bisect.bisect_left(self._ends, step)
        self._look_at(epoch)
        first = self._ends[epoch - 1] if epoch else 0
        return epoch, self._runs[step - first - 1]

    def _look_at(self, epoch: int) -> None:
        if epoch != self._epoch:
            ordered = sorted(self._examples, key=lambda example: self._rank(epoch, example))
            self._epoch, self._runs = epoch, split_by_tokens(ordered, self._sequences, self._budget)
        if epoch == len(self._ends):
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._runs))

    def _rank(self, epoch: int, example: ItemT) -> tuple[bytes, str]:
        name = self._name(example)
        return hashlib.blake2b(f"{self._seed}:{epoch}:{name}".encode(), digest_size=16).digest(), name
