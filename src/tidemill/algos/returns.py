"""Token rewards, discounted returns, generalised advantages, the clipped value loss. Time is the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WHITEN_FLOOR = 1e-8


def discounted_returns(rewards_T: Tensor, *, gamma: float) -> Tensor:
    """R_t = r_t + γ R_{t+1}, nothing after the end.

    Args:
        rewards_T: float [..., T]; zeros after a sample's end leave its returns as they are.
        gamma: discount per token.

    Returns:
        float [..., T] of the same type.
    """
    returns_T = torch.empty_like(rewards_T)
    ahead = rewards_T.new_zeros(rewards_T.shape[:-1])
    for t in range(rewards_T.shape[-1] - 1, -1, -1):
        ahead = rewards_T[..., t] + gamma * ahead
        returns_T[..., t] = ahead
    return returns_T


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    next_values_T: Tensor,
    *,
    terminated_T: Tensor,
    truncated_T: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalised advantages: δ_t = r_t + γ V_{t+1} (1 - terminated_t) - V_t; A_t = δ_t + γλ (1 - ended_t) A_{t+1}.

    Args:
        rewards_T: float [..., T].
        values_T: float [..., T], of the state in which each action was chosen.
        next_values_T: float [..., T], of the state it led to. Where an episode was truncated that is its *final*
            observation, not the first of whatever follows; where it terminated the value is ignored.
        terminated_T: bool [..., T], the episode ended by itself here: nothing is to come.
        truncated_T: bool [..., T], it was cut here: what would have come is estimated by the next value.
        gamma: discount per step.
        lam: 0 trusts the next value, 1 the whole return.

    Returns:
        float [..., T], without gradient. `advantages + values` are the returns that a critic learns. The last step
        ends in any case. Steps after an end belong to another episode and do not reach back over it.

    Source: "High-dimensional continuous control using generalized advantage estimation", arXiv 1506.02438.
    """
    with torch.no_grad():
        delta_T = rewards_T + gamma * torch.where(terminated_T, 0.0, next_values_T) - values_T
        keep_T = gamma * lam * (~(terminated_T | truncated_T)).to(delta_T.dtype)
        advantages_T = torch.empty_like(delta_T)
        ahead = delta_T.new_zeros(delta_T.shape[:-1])
        for t in range(delta_T.shape[-1] - 1, -1, -1):
            ahead = delta_T[..., t] + keep_T[..., t] * ahead
            advantages_T[..., t] = ahead
        return advantages_T


def whiten(advantages_T: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all elements, (A - mean) / sqrt(var + 1e-8), ddof 1; zeros where all are equal.

    Args:
        advantages_T: float [T], of every trained token of the batch.

    Returns:
        float32 [T].
    """
    values_T = advantages_T.double()
    if values_T.numel() < 2 or bool((values_T == values_T[0]).all()):
        return torch.zeros(advantages_T.shape, dtype=torch.float32, device=advantages_T.device)
    centred_T = values_T - values_T.mean()
    return (centred_T * torch.rsqrt(values_T.var(correction=1) + WHITEN_FLOOR)).float()


def explained_variance(values_T: Tensor, returns_T: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one that says the mean, negative for worse.

    Args:
        values_T, returns_T: float [T]. Of equal returns there is nothing to explain: 0.
    """
    variance = float(returns_T.double().var(correction=0)) if returns_T.numel() else 0.0
    if variance == 0.0:
        return 0.0
    return 1.0 - float((returns_T.double() - values_T.double()).var(correction=0)) / variance


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Of each token; only `loss_T` carries a gradient."""

    loss_T: Tensor  # float [T]
    clipped_T: Tensor  # bool [T], where the clip changed the loss


def value_loss(values_T: Tensor, returns_T: Tensor, start_values_T: Tensor, *, clip: float = 0.0) -> ValueLoss:
    """(V - R)², or with a clip the larger of that and (V_start + clamp(V - V_start, ±clip) - R)².

    Args:
        values_T: float [T], now, with gradient.
        returns_T: float [T], taken as constants.
        start_values_T: float [T], at the start of the update; taken as constants.
        clip: how far a value may move in one update, in units of the return; 0 for the plain loss.

    A clipped token's gradient is zero. The coefficient (0.5 by default) is not in here.

    Source: PPO's public code, as described in "Implementation matters in deep policy gradients", arXiv 2005.12729.
    """
    returns_T, start_values_T = returns_T.detach(), start_values_T.detach()
    plain_T = (values_T - returns_T).square()
    if not clip:
        return ValueLoss(loss_T=plain_T, clipped_T=torch.zeros_like(plain_T, dtype=torch.bool))
    with torch.no_grad():
        moved_T = values_T - start_values_T
        held_T = start_values_T + moved_T.clamp(-clip, clip)
        bound_T = (held_T - returns_T).square()
        clipped_T = (moved_T.abs() > clip) & (bound_T > plain_T)  # in range, held_T differs from V by rounding only
    return ValueLoss(loss_T=torch.where(clipped_T, bound_T, plain_T), clipped_T=clipped_T)
