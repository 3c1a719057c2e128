"""One batch on its way to one version: minibatches of microbatches, and the sums that its metrics are read from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

import torch

from tidemill.algos.kl import MismatchSums, approximate_kl, mismatch, no_mismatch
from tidemill.trainer.packing import Microbatch, Weighted, packed_size
from tidemill.trainer.policy_loss import PolicyOutcome


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
    pairs_packed: int = 0  # of tokens within one such pass
    tokens_unpacked: int = 0  # what they would have been without sharing
    clipped: float = 0.0
    truncated: float = 0.0  # tokens whose weight a correction held at a limit
    masked: float = 0.0  # tokens that a correction left out
    entropy: float = 0.0
    approx_kl: float = 0.0
    kl_ref: float | None = None  # None without a reference
    kl_ref_k1: float = 0.0
    kl_beta: float = 0.0  # the coefficient that the batch was learned with
    loss: float = 0.0
    optimizer_steps: int = 0
    steps_skipped_nonfinite: int = 0
    minibatches_dropped: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    train_s: float = 0.0
    cpu_s: float = 0.0  # of that, on a processor
    mismatch: MismatchSums = field(default_factory=no_mismatch)
    tokens_by_lag: Counter[int] = field(default_factory=Counter)
    critic: list[dict[str, float]] = field(default_factory=list)  # of each of its steps
    critic_wait_s: float | None = None  # for a critic elsewhere; None where it computes here

    def first_sight(self, microbatch: Microbatch, logprobs_T: torch.Tensor) -> None:
        """What is told of a microbatch once, of logprobs as good as those at the start of the update."""
        self.tokens_by_lag += microbatch.tokens_by_lag
        if not bool(microbatch.rollout_logprobs.isnan().any()):
            self.mismatch += mismatch(microbatch.rollout_logprobs, logprobs_T)

    def learned(
        self, microbatch: Microbatch, outcome: PolicyOutcome, logprobs_T: torch.Tensor, entropy_T: torch.Tensor
    ) -> None:
        """What is told of a microbatch each time it adds a gradient."""
        assert microbatch.proximal_logprobs is not None
        moved_T = approximate_kl(logprobs_T, microbatch.proximal_logprobs)
        self.clipped += float(outcome.token.clipped_T.sum())
        self.truncated += float(outcome.corrected.truncated_T.sum())
        self.masked += float(outcome.corrected.masked_T.sum())
        self.entropy += float(entropy_T.detach().sum())
        self.approx_kl += float(moved_T.sum())
        self.tokens_trained += microbatch.tokens
        self.tokens_packed += microbatch.tree.size
        self.pairs_packed += microbatch.tree.size**2
        self.tokens_unpacked += microbatch.unpacked_tokens
        if outcome.kl_T is not None:
            self.kl_ref = (self.kl_ref or 0.0) + float(outcome.kl_T.sum())
        if outcome.log_ratio_ref_T is not None:
            self.kl_ref_k1 += float(outcome.log_ratio_ref_T.sum())

    def values(self) -> dict[str, float]:
        """Metrics by name; see docs/metrics.md. Of no trained tokens and no optimizer steps there are no means."""
        values: dict[str, float] = {
            "groups_without_signal": self.groups_without_signal,
            "groups_skipped_invalid": self.groups_skipped_invalid,
            "tokens_trained": self.tokens_trained,
            "tokens_packed": self.tokens_packed,
            "pairs_packed": self.pairs_packed,
            "tokens_unpacked": self.tokens_unpacked,
            "optimizer_steps_skipped": self.steps_skipped_nonfinite,
            "minibatches_dropped": self.minibatches_dropped,
            "time_train_s": self.train_s,
            "cpu_train_s": self.cpu_s,
        }
        if self.kl_beta:
            values["kl_beta"] = self.kl_beta
        if self.critic_wait_s is not None:
            values["time_critic_wait_s"] = self.critic_wait_s
        if self.tokens_by_lag:
            values |= self._lags()
        if self.mismatch.tokens:
            values |= self._ratios()
        if self.tokens_trained:
            values |= self._means_of_tokens()
        if self.optimizer_steps:
            values |= {
                "loss": self.loss / self.optimizer_steps,
                "grad_norm": self.grad_norm / self.optimizer_steps,
                "learning_rate": self.learning_rate,
            }
        return values | self._critic_means()

    def _means_of_tokens(self) -> dict[str, float]:
        tokens = self.tokens_trained
        means = {
            "entropy": self.entropy / tokens,
            "approx_kl": self.approx_kl / tokens,
            "clip_fraction": self.clipped / tokens,
            "correction_truncated": self.truncated / tokens,
            "correction_masked": self.masked / tokens,
        }
        if self.kl_ref is None:
            return means
        return means | {"kl_ref": self.kl_ref / tokens, "kl_ref_k1": self.kl_ref_k1 / tokens}

    def _ratios(self) -> dict[str, float]:
        stats = self.mismatch.reduce()
        return {
            "mismatch_kl": stats.mismatch_kl,
            "ratio_mean": stats.ratio_mean,
            "ratio_var": stats.ratio_variance,
            "ratio_max": stats.ratio_max,
            "effective_sample_size": stats.effective_sample_size,
        }

    def _lags(self) -> dict[str, float]:
        """Mean, largest, and the share of tokens at each lag."""
        tokens = self.tokens_by_lag.total()
        mean = sum(lag * count for lag, count in self.tokens_by_lag.items()) / tokens
        shares = {f"lag/{lag}": count / tokens for lag, count in sorted(self.tokens_by_lag.items())}
        return {"policy_lag_mean": mean, "policy_lag_max": float(max(self.tokens_by_lag)), **shares}

    def _critic_means(self) -> dict[str, float]:
        """Of each figure, over the critic's steps that had it."""
        names = dict.fromkeys(name for step in self.critic for name in step)
        return {name: fmean(step[name] for step in self.critic if name in step) for name in names}
