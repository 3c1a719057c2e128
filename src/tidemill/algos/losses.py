"""Policy losses on flattened tokens, loss normalisation, and formulas of the other loss terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """T tokens of S samples, in any order."""

    index_T: Tensor  # int64 [T], the sample of each token
    count: int  # S, including samples without tokens
    buffer_T: Tensor | None = None  # int64 [T], rank of each token by sample and place in it; None: ascending by place

    def sum(self, values_T: Tensor) -> Tensor:
        """float [S], 0 for a sample without tokens; differentiable."""
        sums_S = values_T.new_zeros(self.count)
        if values_T.is_cuda:  # `index_add` adds there in any order; this sorts
            return sums_S.index_put((self.index_T,), values_T, accumulate=True)
        return sums_S.index_add(0, self.index_T, values_T)

    def mean(self, values_T: Tensor) -> Tensor:
        """float [S], 0 for a sample without tokens; differentiable."""
        return self.sum(values_T) / self.sum(torch.ones_like(values_T)).clamp(min=1.0)

    def spread(self, values_S: Tensor) -> Tensor:
        """[T], the value of each token's sample."""
        return values_S[self.index_T]


Normalize: TypeAlias = Literal["sample", "token", "constant"]
"""sample: mean over each sample's tokens, then over samples. token: mean over all tokens of the batch. constant: sum
over tokens divided by samples × a constant."""

LOG_RATIO_LIMIT = 80.0  # keeps exp finite in float32: the zero gradient of a clipped token must not become 0 * inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Per-token result of a policy loss; only `loss_T` has a gradient."""

    loss_T: Tensor  # float [T]
    clipped_T: Tensor  # bool [T], where clipping changed the objective
    ratio_T: Tensor  # float [T], trainer probability / proximal probability


def ppo_clip(
    trainer_logprobs_T: Tensor,
    proximal_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate: J = min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high) A), loss = -J, ρ = exp(trainer - proximal).

    Args:
        trainer_logprobs_T: float [T], of the current policy, with gradient.
        proximal_logprobs_T: float [T], at the start of the update; detached.
        advantages_T: float [T], detached.
        clip_low, clip_high: widths of the clip range below and above 1.
        dual_clip: c > 1; lower bound cA on the objective where A < 0. None: no bound.

    Only tokens whose objective clipping changed count as clipped; their gradient is zero. A ratio outside the range is
    not clipped if its advantage already pulls it back.

    Source: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; separate widths, DAPO, arXiv 2503.14476.
    """
    advantages_T = advantages_T.detach()
    log_ratio_T = trainer_logprobs_T - proximal_logprobs_T.detach()
    ratio_T = torch.exp(log_ratio_T.clamp(max=LOG_RATIO_LIMIT))
    plain_T = ratio_T * advantages_T
    with torch.no_grad():
        bound_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
        clipped_T = bound_T < plain_T
        if dual_clip is not None:
            floor_T = dual_clip * advantages_T
            below_T = (advantages_T < 0) & (torch.minimum(plain_T, bound_T) < floor_T)
            bound_T = torch.where(below_T, floor_T, bound_T)
            clipped_T = clipped_T | below_T
    objective_T = torch.where(clipped_T, bound_T, plain_T)
    return TokenLoss(loss_T=-objective_T, clipped_T=clipped_T, ratio_T=ratio_T.detach())


def gspo(
    trainer_logprobs_T: Tensor,
    proximal_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    samples: Samples,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """One ratio per sequence, s = exp(mean_t log ρ_t), and each token's own gradient: s_t = sg(s) π_t / sg(π_t),
    J = min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A), loss = -J.

    Args:
        trainer_logprobs_T, proximal_logprobs_T, advantages_T: as for `ppo_clip`.
        samples: the sample of each token.
        clip_low, clip_high: widths of the clip range; small, because the mean over tokens varies little.

    This is GSPO-token. If all tokens of a sequence have the same advantage and correction weight, their mean
    (normalize = "sample") has the value and gradient of GSPO; otherwise each token's gradient -s A_t ∇log π_t has its
    own weight. The sign of the token's advantage decides on which side s is clipped.

    Source: GSPO, arXiv 2507.18071, section 4.3.
    """
    advantages_T, now_T = advantages_T.detach(), trainer_logprobs_T.detach()
    log_ratio_S = samples.mean(now_T - proximal_logprobs_T.detach())
    sequence_ratio_T = samples.spread(torch.exp(log_ratio_S.clamp(max=LOG_RATIO_LIMIT)))
    plain_T = sequence_ratio_T * torch.exp(trainer_logprobs_T - now_T) * advantages_T
    with torch.no_grad():
        bound_T = sequence_ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
        clipped_T = bound_T < plain_T
    return TokenLoss(loss_T=-torch.where(clipped_T, bound_T, plain_T), clipped_T=clipped_T, ratio_T=sequence_ratio_T)


def cispo(
    trainer_logprobs_T: Tensor, proximal_logprobs_T: Tensor, advantages_T: Tensor, *, clip_high: float
) -> TokenLoss:
    """loss = -sg(min(ρ, clip_high)) A log π: truncates large ratios and keeps the gradient of their tokens.

    Args:
        trainer_logprobs_T, proximal_logprobs_T, advantages_T: as for `ppo_clip`.
        clip_high: the largest ratio, as in TRL (elsewhere 1 + clip_high); there is no lower bound.

    Source: MiniMax-M1, arXiv 2506.13585.
    """
    log_ratio_T = (trainer_logprobs_T - proximal_logprobs_T).detach()
    ratio_T = torch.exp(log_ratio_T.clamp(max=LOG_RATIO_LIMIT))
    loss_T = -ratio_T.clamp(max=clip_high) * advantages_T.detach() * trainer_logprobs_T
    return TokenLoss(loss_T=loss_T, clipped_T=ratio_T > clip_high, ratio_T=ratio_T)


def token_weights(lengths_S: Sequence[int], normalize: Normalize) -> list[float]:
    """Token weight of each sample: Σ weight · loss / `denominator` is the mean.

    Args:
        lengths_S: trained tokens of each sample; 0 for an invalid one.
        normalize: kind of mean.

    Returns:
        [S], 1 / length for "sample", else 1; 0 for a sample without tokens. A weight depends only on its own sample,
        so gradients can accumulate before the batch is complete.
    """
    if normalize == "sample":
        return [1.0 / length if length else 0.0 for length in lengths_S]
    return [1.0 if length else 0.0 for length in lengths_S]


def denominator(lengths_S: Sequence[int], normalize: Normalize, *, constant: int = 1) -> int:
    """Divisor of the weighted sum: samples with tokens ("sample"), tokens ("token"), samples × `constant` ("constant").

    Additive over microbatches.
    """
    if normalize == "token":
        return sum(lengths_S)
    samples = sum(1 for length in lengths_S if length)
    return samples if normalize == "sample" else samples * constant


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """An entry of `LOSSES`."""

    function: Callable[..., TokenLoss]  # (trainer logprobs [T], proximal logprobs [T], advantages [T], settings)
    settings: tuple[str, ...]  # keys of [algorithm] passed by name
    by_sample: bool = False  # also takes `samples`
    formula: str
    source: str


LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(
        function=ppo_clip,
        settings=("clip_low", "clip_high", "dual_clip"),
        formula="J = min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A);  where A < 0, J = max(J, dual_clip A);  -J",
        source="PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; DAPO, arXiv 2503.14476",
    ),
    "gspo": PolicyLoss(
        function=gspo,
        settings=("clip_low", "clip_high"),
        by_sample=True,
        formula="s = sg(exp(mean_t log ρ)) π_t / sg(π_t);  J = min(s A, clip(s, 1 - clip_low, 1 + clip_high) A);  -J",
        source="GSPO-token, arXiv 2507.18071, section 4.3",
    ),
    "cispo": PolicyLoss(
        function=cispo,
        settings=("clip_high",),
        formula="-sg(min(ρ, clip_high)) A log π",
        source="MiniMax-M1, arXiv 2506.13585",
    ),
}


class Term(NamedTuple):
    """An entry of `TERMS`."""

    formula: str
    source: str
    settings: tuple[str, ...] = ()  # configuration keys, `section.key`


TERMS: dict[str, dict[str, Term]] = {
    "normalize": {
        "sample": Term("1 / S Σ_s 1 / |s| Σ_t loss_t, over S samples", "DeepSeekMath, arXiv 2402.03300"),
        "token": Term("Σ_s Σ_t loss_t / Σ_s |s|", "DAPO, arXiv 2503.14476"),
        "constant": Term(
            "Σ_s Σ_t loss_t / (S max_new_tokens)", "Dr. GRPO, arXiv 2503.20783", ("sampling.max_new_tokens",)
        ),
    },
    "kl": {
        "loss": Term(
            "k3 = e^d - d - 1, d = ref - trainer;  loss + kl_beta k3, times the importance ratio with kl_ratio = true",
            'J. Schulman, "Approximating KL divergence", 2020',
            ("algorithm.kl_beta", "algorithm.kl_ratio"),
        ),
        "reward": Term("k1 = rollout - ref;  r_t - kl_beta k1_t", "RLHF, arXiv 1909.08593", ("algorithm.kl_beta",)),
        "kl_target": Term(
            "kl_beta ← kl_beta (1 + 0.1 clip(kl / kl_target - 1, ±0.2)) after each batch; not set: fixed",
            "arXiv 1909.08593, section 2.2",
            ("algorithm.kl_target",),
        ),
        "kl_stop": Term(
            "mean(ρ - 1 - log ρ) > kl_stop ends the update; not set: never",
            'J. Schulman, "Approximating KL divergence", 2020',
            ("algorithm.kl_stop",),
        ),
    },
    "value": {
        "value_clip": Term(
            "max((V - R)², (V_start + clamp(V - V_start, ±value_clip) - R)²);  value_clip = 0: (V - R)²",
            '"Implementation matters in deep policy gradients", arXiv 2005.12729',
            ("critic.value_clip", "critic.value_coefficient"),
        ),
        "normalize": Term(
            "V and R as (x - mean) / std of the returns so far", "PopArt, arXiv 1602.07714", ("critic.normalize",)
        ),
    },
    "shaping": {
        "overlong": Term(
            "R + min(-(L - (max_new_tokens - b)) / b, 0), L trained tokens long, b = overlong_buffer_tokens; 0: off",
            "DAPO, arXiv 2503.14476, whose b is a fifth of the longest completion",
            ("algorithm.overlong_buffer_tokens",),
        ),
        "entropy_bonus": Term("loss_t - entropy_bonus H(π_t)", "A3C, arXiv 1602.01783", ("algorithm.entropy_bonus",)),
    },
    "supervised": {
        "sft": Term("-log π, mean over a minibatch's completion tokens", "InstructGPT, arXiv 2203.02155"),
        "reward_model": Term(
            "-log σ(r_w - r_l - margin) + centring (r_w + r_l)²",
            'Bradley and Terry, 1952; Llama 2, arXiv 2307.09288 (margin); "Helping or herding?", arXiv 2312.09244',
            ("reward_model.centring",),
        ),
    },
}
"""Loss terms by table of `tidemill algorithms`."""
