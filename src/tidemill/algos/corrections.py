"""Off-policy corrections for tokens that an older policy or a different engine generated.

Each multiplies a token's loss by a function of r = exp(proximal - rollout), without gradient; clipping then acts on
ρ = exp(trainer - proximal). This is decoupled PPO: r corrects the sampling distribution, the clip limits the update.
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
    """Per-token result of a correction, without gradient."""

    weights_T: Tensor  # float [T], factors of the loss
    truncated_T: Tensor  # bool [T], where a bound changed the weight
    masked_T: Tensor  # bool [T], where the weight was set to 0


def none(log_ratio_T: Tensor, samples: Samples) -> Corrected:
    """Weight 1: treats tokens as if the proximal policy had generated them."""
    false_T = torch.zeros_like(log_ratio_T, dtype=torch.bool)
    return Corrected(weights_T=torch.ones_like(log_ratio_T), truncated_T=false_T, masked_T=false_T)


def tis(log_ratio_T: Tensor, samples: Samples, *, high: float) -> Corrected:
    """Truncated importance sampling, min(r, high) per token.

    Args:
        log_ratio_T: float [T], proximal minus rollout logprobs.
        samples: the sample of each token.
        high: largest weight (C).

    Source: "Your efficient RL framework secretly brings you off-policy RL training", F. Yao et al., 2025.
    """
    return _truncate(_exp(log_ratio_T), None, high)


def clip_range(log_ratio_T: Tensor, samples: Samples, *, low: float, high: float) -> Corrected:
    """min(max(r, low), high): `tis` with a lower bound on the weight. Arguments as for `tis`."""
    return _truncate(_exp(log_ratio_T), low, high)


def icepop(log_ratio_T: Tensor, samples: Samples, *, low: float, high: float) -> Corrected:
    """r where low ≤ r ≤ high, else 0: masks tokens on which the policies disagree. Arguments as for `tis`.

    Source: IcePop, "Every step evolves", arXiv 2510.18855.
    """
    ratio_T = _exp(log_ratio_T)
    masked_T = (ratio_T < low) | (ratio_T > high)
    return Corrected(
        weights_T=ratio_T.masked_fill(masked_T, 0.0), truncated_T=torch.zeros_like(masked_T), masked_T=masked_T
    )


def sequence_tis(log_ratio_T: Tensor, samples: Samples, *, high: float) -> Corrected:
    """min(Π_t r_t, high), one weight for all tokens of a sample. Arguments as for `tis`.

    Unbiased except for the bound; the variance grows with length.

    Source: "When speed kills stability", J. Liu et al., 2025.
    """
    return _truncate(samples.spread(_exp(samples.sum(log_ratio_T.detach()))), None, high)


def geometric(log_ratio_T: Tensor, samples: Samples, *, low: float, high: float) -> Corrected:
    """1 for samples with low ≤ exp(mean_t log r_t) ≤ high, else 0: length-independent rejection of samples.

    Arguments as for `tis`.

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
    """Π_k min(r_k, high) over the versions published between rollout and proximal.

    Args:
        log_ratios_KT: float [K, T], differences of consecutive versions: first - rollout, ..., proximal - last.
            Without truncation the product is r; with K = 1 this is `tis`.
        samples: the sample of each token.
        high: largest factor.

    Truncating each factor limits the contribution of one publish, as V-trace (IMPALA, arXiv 1802.01561) limits that of
    one time step.
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
        lags_T: int64 [T], versions between generation and the start of the update; the update itself counts as one
            more. At lag 0 the proximal logprobs equal the rollout logprobs.

    Returns:
        float [T], without gradient.

    Source: A-3PO, arXiv 2512.06547.
    """
    share_T = lags_T.to(trainer_logprobs_T.dtype) / (lags_T + 1)
    return (rollout_logprobs_T + share_T * (trainer_logprobs_T - rollout_logprobs_T)).detach()


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.detach().clamp(max=LOG_RATIO_LIMIT))


def _truncate(ratio_T: Tensor, low: float | None, high: float) -> Corrected:
    weights_T = ratio_T.clamp(min=low, max=high)
    return Corrected(
        weights_T=weights_T, truncated_T=weights_T != ratio_T, masked_T=torch.zeros_like(ratio_T, dtype=torch.bool)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """An entry of `CORRECTIONS`."""

    function: Callable[..., Corrected]  # (log r [T] or, for mu_step, [K, T]; samples; limits by name)
    limits: tuple[str, ...]  # keys of [algorithm.correction] passed by name
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
