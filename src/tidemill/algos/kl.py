"""Estimates of the KL divergence and the importance ratios of two policies, from logprobs of sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ADAPTATION = 0.1  # fraction of the error corrected per batch
ADAPTATION_LIMIT = 0.2  # largest error that counts


def k3(trainer_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Per-token estimate of KL(trainer ‖ ref): e^d - d - 1 with d = ref - trainer; never negative.

    Args:
        trainer_logprobs_T: float [T], with gradient if used as a loss term.
        ref_logprobs_T: float [T], of the reference model; detached.

    Returns:
        float [T].

    The *value* is an unbiased estimate for tokens sampled from the trainer's policy. The *gradient* as a loss term,
    (1 - e^d) ∇ log π, is in expectation that of KL(ref ‖ trainer), not of KL(trainer ‖ ref). For tokens sampled from an
    older policy both hold only if each token is weighted by the importance ratio; if the ratio has a gradient
    (`k3 * ratio`), the gradient is that of KL(trainer ‖ ref).

    Source: J. Schulman, "Approximating KL divergence", 2020.
    """
    d_T = ref_logprobs_T.detach() - trainer_logprobs_T
    return torch.expm1(d_T) - d_T


def approximate_kl(trainer_logprobs_T: Tensor, proximal_logprobs_T: Tensor) -> Tensor:
    """Per-token estimate of KL(proximal ‖ trainer), ρ - 1 - log ρ, without gradient.

    Args:
        trainer_logprobs_T: float [T], of the current policy.
        proximal_logprobs_T: float [T], at the start of the update; assumed to be the sampling distribution.

    Returns:
        float [T], never negative; `kl_stop` is compared with its mean over tokens.
    """
    return k3(proximal_logprobs_T.detach(), trainer_logprobs_T)


def gaussian_kl(old_means: Tensor, old_log_stds: Tensor, means: Tensor, log_stds: Tensor) -> Tensor:
    """KL(old ‖ new) of normal distributions with independent dimensions, in nats.

    Args:
        old_means, means: float [..., A].
        old_log_stds, log_stds: logarithms of standard deviations, float [A].

    Returns:
        float [...]: Σ_A log σ - log σ_old + (σ_old² + (μ_old - μ)²) / (2 σ²) - 1/2.
    """
    squares = (2 * old_log_stds).exp() + (old_means - means).square()
    return (log_stds - old_log_stds + 0.5 * squares * (-2 * log_stds).exp() - 0.5).sum(-1)


def kl_reward(rollout_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Per-token estimate of KL(rollout ‖ ref), log(rollout / ref), a penalty on each token's reward.

    Args:
        rollout_logprobs_T: float [T], of the policy that generated the tokens, for which the estimate is unbiased.
        ref_logprobs_T: float [T].

    Returns:
        float [T], of either sign, without gradient.
    """
    return (rollout_logprobs_T - ref_logprobs_T).detach()


def adapted_beta(beta: float, kl: float, target: float) -> float:
    """The next KL coefficient, β (1 + 0.1 · clip(kl / target - 1, ±0.2)): changes by at most 2 %.

    Args:
        beta: current coefficient.
        kl: measured over the last batch, nats per token.
        target: nats per token.

    Source: "Fine-tuning language models from human preferences", arXiv 1909.08593, section 2.2.
    """
    return beta * (1.0 + ADAPTATION * min(max(kl / target - 1.0, -ADAPTATION_LIMIT), ADAPTATION_LIMIT))


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSums:
    """Difference of the trainer's and the sampling probabilities; r = exp(trainer - rollout).

    Sums over microbatches, combined with `+` and reduced once per step.
    """

    tokens: int
    excess: Tensor  # float64 [], Σ (r - 1), which keeps small differences from 1
    excess_squared: Tensor  # float64 [], Σ (r - 1)²
    kl: Tensor  # float64 [], Σ (r - 1 - log r)
    largest: Tensor  # float64 [], max r

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            tokens=self.tokens + other.tokens,
            excess=self.excess + other.excess,
            excess_squared=self.excess_squared + other.excess_squared,
            kl=self.kl + other.kl,
            largest=torch.maximum(self.largest, other.largest),
        )

    def as_list(self) -> list[float]:
        """The fields, which `from_list` reads."""
        sums = torch.stack((self.excess, self.excess_squared, self.kl, self.largest))
        return [float(self.tokens), *sums.tolist()]

    @staticmethod
    def from_list(values: list[float]) -> MismatchSums:
        excess, squared, kl, largest = torch.tensor(values[1:], dtype=torch.float64).unbind()
        return MismatchSums(tokens=int(values[0]), excess=excess, excess_squared=squared, kl=kl, largest=largest)

    def reduce(self) -> dict[str, float]:
        """Metrics of the step; empty without tokens. The KL is KL(rollout ‖ trainer) in nats per token."""
        if not self.tokens:
            return {}
        n = self.tokens
        excess, squared, kl, largest = torch.stack((self.excess, self.excess_squared, self.kl, self.largest)).tolist()
        ratio_sum, ratio_squares = n + excess, n + 2.0 * excess + squared
        return {
            "mismatch_kl": kl / n,
            "ratio_mean": ratio_sum / n,
            "ratio_var": max(squared / n - (excess / n) ** 2, 0.0),
            "ratio_max": largest,
            "effective_sample_size": ratio_sum**2 / (n * ratio_squares) if ratio_squares > 0 else 0.0,
        }


def mismatch(rollout_logprobs_T: Tensor, trainer_logprobs_T: Tensor) -> MismatchSums:
    """Sums of r = exp(trainer - rollout) over a microbatch, without gradient or host synchronisation.

    Args:
        rollout_logprobs_T: float [T], recorded when the tokens were sampled.
        trainer_logprobs_T: float [T], of the same tokens at the start of the update (proximal).
    """
    log_ratio_T = (trainer_logprobs_T.detach() - rollout_logprobs_T.detach()).double()
    excess_T = torch.expm1(log_ratio_T)
    zero = excess_T.new_zeros(())
    return MismatchSums(
        tokens=excess_T.numel(),
        excess=excess_T.sum(),
        excess_squared=excess_T.square().sum(),
        kl=(excess_T - log_ratio_T).sum(),
        largest=excess_T.max() + 1.0 if excess_T.numel() else zero,
    )


def mismatch_by_source(
    rollout_logprobs_T: Tensor, trainer_logprobs_T: Tensor, sources_T: Tensor, sources: int
) -> Tensor:
    """Sums of `mismatch` for each engine and worker: float64 [2, sources], Σ (r - 1 - log r) and the tokens.

    Args:
        sources_T: int64 [T], which of them generated the token.
    """
    log_ratio_T = (trainer_logprobs_T.detach() - rollout_logprobs_T.detach()).double()
    kl_T = torch.expm1(log_ratio_T) - log_ratio_T
    terms = torch.stack((kl_T, torch.ones_like(kl_T)))
    if terms.is_cuda:  # `index_add_` adds there in any order; this sorts
        return kl_T.new_zeros(sources, 2).index_put_((sources_T,), terms.T, accumulate=True).T
    return kl_T.new_zeros(2, sources).index_add_(1, sources_T, terms)


def no_mismatch() -> MismatchSums:
    """Sums over zero tokens, the start of an accumulation."""
    return mismatch(torch.zeros(0), torch.zeros(0))
