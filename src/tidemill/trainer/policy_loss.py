"""One microbatch's loss: the policy objective, corrected for who generated the tokens, and the terms beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.algos.corrections import CORRECTIONS, Corrected
from tidemill.algos.kl import k3
from tidemill.algos.losses import LOSSES, TokenLoss
from tidemill.config.algorithm import AlgorithmConfig
from tidemill.trainer.packing import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """The weighted sum to be differentiated, and what is told of its tokens."""

    loss: Tensor  # [], with gradient
    token: TokenLoss
    corrected: Corrected
    kl_T: Tensor | None  # float [T], k3 to the reference, without gradient
    log_ratio_ref_T: Tensor | None  # float [T], log(trainer / reference), without gradient


def policy_outcome(
    algorithm: AlgorithmConfig, microbatch: Microbatch, logprobs_T: Tensor, entropy_T: Tensor, *, kl_beta: float
) -> PolicyOutcome:
    """Loss of a microbatch whose proximal logprobs are known: Σ weight · (correction · policy loss + KL - entropy).

    Args:
        logprobs_T: float [T], now, with gradient.
        entropy_T: float [T] in nats, with gradient where there is a bonus on it.
        kl_beta: the present coefficient of the KL term.
    """
    proximal_T = microbatch.proximal_logprobs
    assert proximal_T is not None, "the proximal logprobs are measured before the loss"
    token = _token_loss(algorithm, microbatch, logprobs_T, proximal_T)
    corrected = _corrected(algorithm, microbatch, proximal_T)
    loss_T = corrected.weights_T * token.loss_T
    kl_T = None
    if microbatch.ref_logprobs is not None:
        kl_T = k3(logprobs_T, microbatch.ref_logprobs)
        if kl_beta and algorithm.kl_in == "loss":
            ratio_T = torch.exp(logprobs_T - proximal_T) * corrected.weights_T if algorithm.kl_ratio else 1.0
            loss_T = loss_T + kl_beta * ratio_T * kl_T
    if algorithm.entropy_bonus:
        loss_T = loss_T - algorithm.entropy_bonus * entropy_T
    return PolicyOutcome(
        loss=(microbatch.weights * loss_T).sum(),
        token=token,
        corrected=corrected,
        kl_T=None if kl_T is None else kl_T.detach(),
        log_ratio_ref_T=None if microbatch.ref_logprobs is None else logprobs_T.detach() - microbatch.ref_logprobs,
    )


def _token_loss(
    algorithm: AlgorithmConfig, microbatch: Microbatch, logprobs_T: Tensor, proximal_T: Tensor
) -> TokenLoss:
    row = LOSSES[algorithm.loss]
    samples = {"samples": microbatch.samples} if row.by_sample else {}
    settings = {name: getattr(algorithm, name) for name in row.settings}
    return row.function(logprobs_T, proximal_T, microbatch.advantages, **samples, **settings)


def _corrected(algorithm: AlgorithmConfig, microbatch: Microbatch, proximal_T: Tensor) -> Corrected:
    config = algorithm.correction
    row = CORRECTIONS[config.kind]
    if config.kind == "none":  # rollout logprobs may be missing
        log_ratio = torch.zeros_like(proximal_T)
    elif config.kind == "mu_step":
        # The last that was published is the trainer's own: where proximal logprobs are recomputed, the last factor is 1
        # for the tokens it was asked about, and the whole ratio for those made since.
        chain_KT = torch.cat([microbatch.rollout_logprobs[None], microbatch.publish_logprobs, proximal_T[None]])
        log_ratio = chain_KT.diff(dim=0)
    else:
        log_ratio = proximal_T - microbatch.rollout_logprobs
    return row.function(log_ratio, microbatch.samples, **{name: getattr(config, name) for name in row.limits})
