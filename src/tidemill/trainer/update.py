"""One batch on its way to one version: minibatches of microbatches, and the sums that its metrics are read from."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.algos.kl import MismatchSums, no_mismatch
from tidemill.trainer.packing import Microbatch, Weighted, packed_size


@dataclass(slots=True)
class Minibatch:
    """The groups of one optimizer step. Samples wait in `open` until the token budget of a microbatch is full."""

    groups: int = 0
    denominator: int = 0  # what the summed gradients are divided by
    open: list[Weighted] = field(default_factory=list)
    open_tokens: int = 0
    microbatches: list[Microbatch] = field(default_factory=list)

    def add(self, samples: list[Weighted], budget: int) -> list[Weighted]:
        """Take samples that belong together; returns the earlier ones when the budget says that they are full."""
        size = packed_size(samples)
        full = self.open if self.open and self.open_tokens + size > budget else []
        if full:
            self.open, self.open_tokens = [], 0
        self.open.extend(samples)
        self.open_tokens += size
        return full

    def close(self) -> list[Weighted]:
        """What is still open, when no more groups will come."""
        rest, self.open, self.open_tokens = self.open, [], 0
        return rest


@dataclass(slots=True)
class Sums:
    """Figures that add up over a batch and are reduced once."""

    groups_without_signal: int = 0
    groups_skipped_invalid: int = 0
    tokens_trained: int = 0
    tokens_packed: int = 0  # computed in forward passes with gradient
    tokens_unpacked: int = 0  # what they would have been without sharing
    clipped: float = 0.0
    entropy: float = 0.0
    approx_kl: float = 0.0
    kl_ref: float | None = None  # None without a reference
    loss: float = 0.0
    optimizer_steps: int = 0
    steps_skipped_nonfinite: int = 0
    minibatches_dropped: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    train_s: float = 0.0
    mismatch: MismatchSums = field(default_factory=no_mismatch)

    def values(self) -> dict[str, float]:
        """Metrics by name; see docs/metrics.md. Of no trained tokens and no optimizer steps there are no means."""
        values: dict[str, float] = {
            "groups_without_signal": self.groups_without_signal,
            "groups_skipped_invalid": self.groups_skipped_invalid,
            "tokens_trained": self.tokens_trained,
            "tokens_packed": self.tokens_packed,
            "tokens_unpacked": self.tokens_unpacked,
            "optimizer_steps_skipped": self.steps_skipped_nonfinite,
            "minibatches_dropped": self.minibatches_dropped,
            "time_train_s": self.train_s,
        }
        if self.tokens_trained:
            values |= self._means_of_tokens()
        if self.optimizer_steps:
            values |= {
                "loss": self.loss / self.optimizer_steps,
                "grad_norm": self.grad_norm / self.optimizer_steps,
                "learning_rate": self.learning_rate,
            }
        return values

    def _means_of_tokens(self) -> dict[str, float]:
        tokens, stats = self.tokens_trained, self.mismatch.reduce()
        means = {
            "entropy": self.entropy / tokens,
            "approx_kl": self.approx_kl / tokens,
            "clip_fraction": self.clipped / tokens,
            "mismatch_kl": stats.mismatch_kl,
            "ratio_mean": stats.ratio_mean,
            "ratio_var": stats.ratio_variance,
            "ratio_max": stats.ratio_max,
            "effective_sample_size": stats.effective_sample_size,
        }
        return means if self.kl_ref is None else means | {"kl_ref": self.kl_ref / tokens}
