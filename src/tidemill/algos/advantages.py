"""How rewards become advantages. One function each; which samples it must see together is its scope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Scope: TypeAlias = Literal["sample", "group", "batch"]
"""What must be complete before the advantage of any sample in it is known."""

STD_FLOOR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """A row of the registry."""

    scope: Scope
    function: Callable[[Tensor, Tensor], Tensor]  # rewards float [N], valid bool [N] -> advantages float32 [N]
    formula: str
    source: str


def grpo(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """Group-relative advantage, A = (R - mean) / (std + 1e-4), std with ddof 1.

    Args:
        rewards_G: float [G], one group's rewards; the values of invalid samples are ignored, even NaN.
        valid_G: bool [G], False where the reward failed or the sample is left out.

    Returns:
        float32 [G]. Statistics are over valid samples; invalid ones get 0. All zeros with fewer than two valid
        samples, and exactly zero when all valid rewards are equal.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; floor and ddof as in TRL.
    """
    advantages_G = torch.zeros(rewards_G.shape, dtype=torch.float32, device=rewards_G.device)
    rewards = rewards_G[valid_G].double()  # in double, so that a common offset does not eat the differences
    if rewards.numel() < 2 or bool((rewards == rewards[0]).all()):
        return advantages_G
    centred = rewards - rewards.mean()
    advantages_G[valid_G] = (centred / (rewards.std(correction=1) + STD_FLOOR)).float()
    return advantages_G


def has_signal(advantages_G: Tensor) -> bool:
    """Whether any sample of the group moves the policy: False for a group to be skipped."""
    return bool((advantages_G != 0).any())


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(
        scope="group",
        function=grpo,
        formula="A = (R - mean_G) / (std_G + 1e-4), ddof 1, over valid samples",
        source="DeepSeekMath, arXiv 2402.03300",
    ),
}
