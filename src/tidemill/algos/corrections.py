"""Corrections for tokens that another policy generated: an older one, or the same computed by another engine.

All weigh a token's loss by a function of r = exp(proximal - rollout), without gradient; clipping then acts on
ρ = exp(trainer - proximal). That is decoupled PPO: the weight says how likely the token is, the clip how far to move.
Source of the decoupling: "Batch size-invariance for policy optimization", arXiv 2110.00641; AReaL, arXiv 2505.24298.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.algos.losses import LOG_RATIO_LIMIT, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """What a correction makes of each token; nothing carries a gradient."""

    weights_T: Tensor  # float [T], what its loss is multiplied by
    truncated_T: Tensor  # bool [T], a bound changed the weight
    masked_T: Tensor  # bool [T], left out


def none(log_ratio_T: Tensor, samples: Samples) -> Corrected:
    """Weight 1: tokens count as if the policy at the update's start had generated them."""
    nowhere_T = torch.zeros_like(log_ratio_T, dtype=torch.bool)
    return Corrected(weights_T=torch.ones_like(log_ratio_T), truncated_T=nowhere_T, masked_T=nowhere_T)


def tis(log_ratio_T: Tensor, samples: Samples, *, high: float) -> Corrected:
    """Truncated importance sampling: min(r, high), each token by itself.

    Args:
        log_ratio_T: float [T], proximal minus rollout logprobs.
        samples: which sample each token is of.
        high: largest weight (C).

    Source: "Your efficient RL framework secretly brings you off-policy RL training", F. Yao et al., 2025.
    """
    return _held(_exp(log_ratio_T), None, high)


def clip_range(log_ratio_T: Tensor, samples: Samples, *, low: float, high: float) -> Corrected:
    """min(max(r, low), high): as `tis`, and no token loses its weight altogether. Arguments as for `tis`."""
    return _held(_exp(log_ratio_T), low, high)


def icepop(log_ratio_T: Tensor, samples: Samples, *, low: float, high: float) -> Corrected:
    """r where low ≤ r ≤ high, else 0: a token on which the policies disagree teaches nothing. Arguments as for `tis`.

    Source: IcePop, "Every step evolves", arXiv 2510.18855.
    """
    ratio_T = _exp(log_ratio_T)
    masked_T = (ratio_T < low) | (ratio_T > high)
    return Corrected(
        weights_T=ratio_T.masked_fill(masked_T, 0.0), truncated_T=torch.zeros_like(masked_T), masked_T=masked_T
    )


def sequence_tis(log_ratio_T: Tensor, samples: Samples, *, high: float) -> Corrected:
    """min(Π_t r_t, high), one weight for all tokens of a sample. Arguments as for `tis`.

    Unbiased but for the bound, and of a variance that grows with length.

    Source: "When speed kills stability", J. Liu et al., 2025.
    """
    return _held(samples.spread(_exp(samples.sum(log_ratio_T.detach()))), None, high)


def geometric(log_ratio_T: Tensor, samples: Samples, *, low: float, high: float) -> Corrected:
    """1 for samples with low ≤ exp(mean_t log r_t) ≤ high, else 0: rejection by a measure that does not grow with
    length. Arguments as for `tis`.

    Source: "When speed kills stability", J. Liu et al., 2025.
    """
    mean_T = samples.spread(_exp(samples.mean(log_ratio_T.detach())))
    masked_T = (mean_T < low) | (mean_T > high)
    return Corrected(
        weights_T=torch.ones_like(mean_T).masked_fill(masked_T, 0.0),
        truncated_T=torch.zeros_like(masked_T),
        masked_T=masked_T,
    )


def mu_step(log_ratios_KT: Tensor, samples: Samples, *, high: float) -> Corrected:
    """Π_k min(r_k, high) over the published versions between rollout and proximal.

    Args:
        log_ratios_KT: float [K, T], of each version to the one before it: first - rollout, ..., proximal - last.
            Without bounds the product telescopes to r; with K = 1 it is `tis`.
        samples: which sample each token is of.
        high: largest factor.

    Truncating each factor bounds how much any one publish may add, as V-trace (IMPALA, arXiv 1802.01561) does for each
    step of time.
    """
    factors_KT = _exp(log_ratios_KT)
    truncated_T = (factors_KT > high).any(0)
    return Corrected(
        weights_T=factors_KT.clamp(max=high).prod(0), truncated_T=truncated_T, masked_T=torch.zeros_like(truncated_T)
    )


def interpolated_proximal(rollout_logprobs_T: Tensor, trainer_logprobs_T: Tensor, lags_T: Tensor) -> Tensor:
    """Proximal logprobs without a forward pass: rollout + lag / (lag + 1) (trainer - rollout).

    Args:
        rollout_logprobs_T, trainer_logprobs_T: float [T].
        lags_T: int64 [T], versions from the one that generated the token to the one at the update's start. The policy
            in the making counts as one more. At lag 0 the rollout logprobs are the proximal ones.

    Returns:
        float [T], without gradient.

    Source: A-3PO, arXiv 2512.06547.
    """
    share_T = lags_T.to(trainer_logprobs_T.dtype) / (lags_T + 1)
    return (rollout_logprobs_T + share_T * (trainer_logprobs_T - rollout_logprobs_T)).detach()


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.detach().clamp(max=LOG_RATIO_LIMIT))


def _held(ratio_T: Tensor, low: float | None, high: float) -> Corrected:
    weights_T = ratio_T.clamp(min=low, max=high)
    return Corrected(
        weights_T=weights_T, truncated_T=weights_T != ratio_T, masked_T=torch.zeros_like(ratio_T, dtype=torch.bool)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A row of the registry."""

    function: Callable[..., Corrected]  # of log r [T] (mu_step: [K, T]) and samples, and the limits
    limits: tuple[str, ...]  # keys of [algorithm.correction] that it is given by name
    formula: str
    source: str


CORRECTIONS: dict[str, Correction] = {
    "none": Correction(function=none, limits=(), formula="1", source="-"),
    "tis": Correction(function=tis, limits=("high",), formula="min(r, high)", source="F. Yao et al., 2025"),
    "icepop": Correction(
        function=icepop, limits=("low", "high"), formula="r · 1[low ≤ r ≤ high]", source="IcePop, arXiv 2510.18855"
    ),
    "sequence_tis": Correction(
        function=sequence_tis, limits=("high",), formula="min(Π_t r_t, high)", source="J. Liu et al., 2025"
    ),
    "geometric": Correction(
        function=geometric,
        limits=("low", "high"),
        formula="1[low ≤ exp(mean_t log r_t) ≤ high]",
        source="J. Liu et al., 2025",
    ),
    "clip_range": Correction(function=clip_range, limits=("low", "high"), formula="min(max(r, low), high)", source="-"),
    "mu_step": Correction(
        function=mu_step,
        limits=("high",),
        formula="Π_k min(r_k, high), r_k between consecutive published versions",
        source="after V-trace, arXiv 1802.01561",
    ),
}
