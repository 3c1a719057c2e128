"""Engine and trainer cost models with seconds measured on a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from tidemill.core.records import Group, Record


class MeasuredEngine(Record):
    """A forward pass costs a constant plus a linear part. Implements `sim.costs.EngineCosts`."""

    slots: int
    pass_s: float
    row_s: float  # per running sample; samples of a group with equal tokens share it
    context_token_s: float  # per attended token
    drawn_s: float  # per sampled token
    prefill_token_s: float
    new_prompt_share: float = 1.0  # of a prompt, the part not shared with other groups
    new_by_depth: tuple[float, ...] = ()  # of a group's samples with k tokens, the share with distinct ones
    boot_s: float = 0.0

    @property
    def cache_tokens(self) -> float:
        return math.inf

    @property
    def longest_sample(self) -> float:
        return math.inf

    def distinct(self, depth: int) -> float:
        """Share of a group's samples with `depth` tokens whose tokens are distinct."""
        return self.new_by_depth[min(depth, len(self.new_by_depth)) - 1] if depth and self.new_by_depth else 1.0

    def forward_s(self, *, rows: float, context_tokens: float, drawn: int, prefilled: float) -> float:
        """Time of one pass."""
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
    """Tokens that training computes for a group; shared prefixes count once."""

    prompt_tokens: float  # per group
    new_by_depth: tuple[float, ...]  # share of samples longer than k whose first k tokens are unique; k = 1, ...
    learned_share: float  # share of groups that add a gradient

    def packed(self, lengths: Sequence[int]) -> float:
        """Packed tokens of a group with completions of these lengths."""
        new = [0.0, *accumulate(self.new_by_depth)]  # the last token of a completion is predicted, not read
        deepest, beyond = len(new) - 1, self.new_by_depth[-1] if self.new_by_depth else 1.0
        completions = sum(
            new[min(length - 1, deepest)] + beyond * max(0, length - 1 - deepest) for length in lengths if length
        )
        return self.learned_share * (self.prompt_tokens + completions)


class MeasuredTrainer:
    """Costs of a batch as the trainer fills its microbatches. Implements `sim.costs.TrainerCosts`; use one instance per
    trainer, because it keeps the state of the open batch.

    Args:
        step_s: per optimizer step, including the new version.
        token_s: per packed token, forward and backward.
        pair_s: per pair of tokens in a microbatch.
        first_s: extra time of the first batch.
        batch_groups, microbatch_tokens, minibatches, epochs: as configured.
        waits: advantages need the whole batch, so training starts when it is complete.
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
        self.packed = 0.0  # trained tokens of the open batch, once per epoch
        self.pairs = 0.0  # of tokens in a microbatch

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
        """Training time of `tokens` in the fewest microbatches."""
        full, rest = divmod(tokens, self._budget)
        pairs = full * self._budget**2 + rest**2
        self.packed += tokens
        self.pairs += pairs
        return tokens * self._token_s + pairs * self._pair_s
