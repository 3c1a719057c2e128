"""Constant cost models, in seconds."""

from __future__ import annotations

import math

from tidemill.core.records import Group, Record


class ConstantEngine(Record):
    """A decode step takes constant time up to `plateau` samples and grows linearly beyond; contexts are free."""

    slots: int
    plateau: int  # samples decoded in the time of one
    step_s: float  # for up to `plateau` samples
    prefill_tokens_per_s: float
    boot_s: float = 0.0
    cache_tokens: float = math.inf

    @property
    def longest_sample(self) -> float:
        return self.cache_tokens

    def decode_s(self, running: int, context_tokens: int, steps: int) -> float:
        return steps * self.step_s * max(1.0, running / self.plateau)

    def prefill_s(self, tokens: int, samples: int = 1) -> float:
        return tokens / self.prefill_tokens_per_s

    @property
    def peak_tokens_per_s(self) -> float:
        """The peak decoding rate."""
        return self.slots / self.decode_s(self.slots, 0, 1)


class ConstantTrainer(Record):
    """Training time is proportional to completion tokens."""

    tokens_per_s: float
    commit: float = 0.0  # seconds
    checkpoint: float = 0.0  # seconds

    def accumulate_s(self, group: Group) -> float:
        return sum(trajectory.completion_length for trajectory in group.trajectories) / self.tokens_per_s

    def commit_s(self) -> float:
        return self.commit

    def checkpoint_s(self) -> float:
        return self.checkpoint
