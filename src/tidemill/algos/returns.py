"""Discounted returns, generalised advantages, whitening and the clipped value loss. Time is the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WHITEN_FLOOR = 1e-8
ROUNDING = 2.0**-50  # relative to the largest value: a few units in the last place of float64
SMALLEST_SPREAD = 1e-12  # of sums that cancel, such as 1 - 0.9 and 0.1


def discounted_returns(rewards_T: Tensor, *, gamma: float) -> Tensor:
    """R_t = r_t + γ R_{t+1}, with R = 0 after the end.

    Args:
        rewards_T: float [..., T]; zero padding after the end does not change a sample's returns.
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
        next_values_T: float [..., T], of the next state; for a truncated episode of its *final* observation, not of the
            first observation of the next episode. Ignored where the episode terminated.
        terminated_T: bool [..., T], True at the last step of a finished episode.
        truncated_T: bool [..., T], True where the episode was cut; the next value stands in for the missing rewards.
        gamma: discount per step.
        lam: 0 uses the next value only, 1 the whole return.

    Returns:
        float [..., T], without gradient; `advantages + values` are the critic's targets. Steps after an end belong to
        another episode and do not affect earlier ones. The last step is always an end.

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


def equal_up_to_rounding(values: Tensor) -> bool:
    """Whether float64 values differ by no more than sums of equal terms in another order, such as 0.1 + 0.2 and 0.3."""
    spread = values.max() - values.min()
    return bool(spread <= SMALLEST_SPREAD + ROUNDING * values.abs().max())


def whiten(advantages_T: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over all trained tokens of the batch, ddof 1; zeros if all are equal.

    Args:
        advantages_T: float [T].

    Returns:
        float32 [T].
    """
    values_T = advantages_T.double()
    if values_T.numel() < 2 or equal_up_to_rounding(values_T):
        return torch.zeros(advantages_T.shape, dtype=torch.float32, device=advantages_T.device)
    above_T = values_T - values_T.min()  # exact where values are close: a common offset has no effect
    centred_T = above_T - above_T.mean()
    return (centred_T * torch.rsqrt(above_T.var(correction=1) + WHITEN_FLOOR)).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Per-token value loss; only `loss_T` has a gradient."""

    loss_T: Tensor  # float [T]
    clipped_T: Tensor  # bool [T], where clipping changed the loss


def value_loss(values_T: Tensor, returns_T: Tensor, start_values_T: Tensor, *, clip: float = 0.0) -> ValueLoss:
    """(V - R)², with a clip max((V - R)², (V_start + clamp(V - V_start, ±clip) - R)²).

    Args:
        values_T: float [T], current values, with gradient.
        returns_T: float [T], detached.
        start_values_T: float [T], at the start of the update; detached.
        clip: largest change of a value in one update, in units of the return; 0 for the plain loss.

    The gradient of a clipped token is zero. The coefficient is applied by the caller.

    Source: PPO's reference code, as described in "Implementation matters in deep policy gradients", arXiv 2005.12729.
    """
    returns_T, start_values_T = returns_T.detach(), start_values_T.detach()
    plain_T = (values_T - returns_T).square()
    if not clip:
        return ValueLoss(loss_T=plain_T, clipped_T=torch.zeros_like(plain_T, dtype=torch.bool))
    with torch.no_grad():
        moved_T = values_T - start_values_T
        held_T = start_values_T + moved_T.clamp(-clip, clip)
        bound_T = (held_T - returns_T).square()
        clipped_T = (moved_T.abs() > clip) & (bound_T > plain_T)  # inside the range held_T differs from V by rounding
    return ValueLoss(loss_T=torch.where(clipped_T, bound_T, plain_T), clipped_T=clipped_T)
