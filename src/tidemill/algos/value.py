"""What a critic learns from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
