"""Engine and trainer as seconds per piece of work, for costs that were measured on a run rather than derived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from tidemill.core.records import Group, Record


class MeasuredEngine(Record):
    """A forward pass takes a while by itself, and longer by what is in it. Implements `sim.costs.EngineCosts`."""

    slots: int
    pass_s: float
    row_s: float  # a running sample taken one token further
    context_token_s: float  # that it attends to
    drawn_s: float  # drawing a token
    prefill_token_s: float
    new_prompt_share: float = 1.0  # of a prompt, what its group does not have in common with others
    boot_s: float = 0.0

    @property
    def cache_tokens(self) -> float:
        return math.inf

    @property
    def longest_sample(self) -> float:
        return math.inf

    def forward_s(self, *, rows: int, context_tokens: int, drawn: int, prefilled: float) -> float:
        """One pass."""
        return (
            self.pass_s
            + self.row_s * rows
            + self.context_token_s * context_tokens
            + self.drawn_s * drawn
            + self.prefill_token_s * prefilled
        )

    def decode_s(self, running: int, context_tokens: int, steps: int) -> float:
        if not running:
            return 0.0
        attended = steps * context_tokens + running * steps * (steps - 1) // 2
        return steps * (self.pass_s + running * (self.row_s + self.drawn_s)) + self.context_token_s * attended

    def prefill_s(self, tokens: int, samples: int = 1) -> float:
        return tokens * self.new_prompt_share * self.prefill_token_s


class Packing(Record):
    """How many tokens training computes for a group: what its samples have in common is computed once."""

    prompt_tokens: float  # of one group
    new_by_depth: tuple[float, ...]  # of samples longer than k tokens, the share whose first k no other has; k = 1, ...
    learned_share: float  # of groups, those that add a gradient

    def packed(self, lengths: Sequence[int]) -> float:
        """Of a group's completions; no more than one group of them differs from the mean."""
        new = [0.0, *accumulate(self.new_by_depth)]  # the last token of a completion is predicted, not read
        deepest, beyond = len(new) - 1, self.new_by_depth[-1] if self.new_by_depth else 1.0
        completions = sum(
            new[min(length - 1, deepest)] + beyond * max(0, length - 1 - deepest) for length in lengths if length
        )
        return self.learned_share * (self.prompt_tokens + completions)


class MeasuredTrainer:
    """A batch on its way through microbatches, as the trainer fills them. Implements `sim.costs.TrainerCosts`; of one
    trainer, because it remembers the open batch.

    Args:
        step_s: of an optimizer's step, with what belongs to a new version.
        token_s: of a packed token, forward and backward.
        pair_s: of a pair of tokens in one microbatch.
        first_s: what the first batch takes beyond that.
        batch_groups, microbatch_tokens, minibatches, epochs: as configured.
        waits: advantages need the whole batch, so that nothing is learned before it is complete.
    """

    def __init__(
        self,
        *,
        step_s: float,
        token_s: float,
        pair_s: float = 0.0,
        packing: Packing,
        batch_groups: int,
        microbatch_tokens: int,
        minibatches: int = 1,
        epochs: int = 1,
        waits: bool = False,
        first_s: float = 0.0,
        checkpoint: float = 0.0,
    ) -> None:
        self._step_s, self._token_s, self._pair_s, self._packing = step_s, token_s, pair_s, packing
        self._first_minibatch, self._budget = batch_groups // minibatches, microbatch_tokens
        self._steps, self._epochs, self._waits = minibatches * epochs, epochs, waits
        self._first_s, self._checkpoint = first_s, checkpoint
        self._groups = 0
        self._open = self._later = self._learned = 0.0  # packed tokens
        self.packed = 0.0  # of the open batch so far, each time they are learned from
        self.pairs = 0.0  # of tokens within one microbatch

    def accumulate_s(self, group: Group) -> float:
        tokens = self._packing.packed([trajectory.completion_length for trajectory in group.trajectories])
        self._groups += 1
        if self._waits or self._groups > self._first_minibatch:
            self._later += tokens
            return 0.0
        full = self._open if self._open and self._open + tokens > self._budget else 0.0
        self._open += tokens - full
        self._learned += full
        return self._learning_s(full)

    def commit_s(self) -> float:
        again = (self._epochs - 1) * (self._learned + self._open + self._later)
        seconds = self._first_s + self._steps * self._step_s
        seconds += sum(map(self._learning_s, (self._open, self._later, again)))
        self._groups, self._first_s = 0, 0.0
        self._open = self._later = self._learned = 0.0
        return seconds

    def take_counts(self) -> tuple[float, float]:
        """(packed tokens, pairs of them) since the last call."""
        counts = self.packed, self.pairs
        self.packed = self.pairs = 0.0
        return counts

    def checkpoint_s(self) -> float:
        return self._checkpoint

    def _learning_s(self, tokens: float) -> float:
        """Of so many tokens in as few microbatches as they fit."""
        full, rest = divmod(tokens, self._budget)
        pairs = full * self._budget**2 + rest**2
        self.packed += tokens
        self.pairs += pairs
        return tokens * self._token_s + pairs * self._pair_s
