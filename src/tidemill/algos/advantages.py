"""Advantage estimators and reward shaping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tidemill.algos.returns import discounted_returns, equal_up_to_rounding, gae

Scope: TypeAlias = Literal["sample", "group", "batch"]
"""The unit that must be complete before the advantages of its samples can be computed."""

STD_FLOOR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """An entry of `ADVANTAGES`.

    At level "sample", `function` maps a group's rewards float64 [G] and valid bool [G] to advantages float32 [G], one
    per sample. At level "token" it maps token rewards float [..., T], and its further arguments, to float [..., T].
    """

    scope: Scope  # without whitening; whitening always needs the batch
    level: Literal["sample", "token"]
    function: Callable[..., Tensor]
    settings: tuple[str, ...] = ()  # keys of [algorithm] passed by name
    deviation: bool = False  # divides by the standard deviation of the group
    formula: str
    source: str


def grpo(rewards_G: Tensor, valid_G: Tensor, *, floor: float = STD_FLOOR) -> Tensor:
    """Group-relative advantage, A = (R - mean) / (std + floor), std with ddof 1.

    Args:
        rewards_G: float64 [G] (or float32), one group's rewards; invalid samples may have any value, including NaN.
        valid_G: bool [G], False where the reward failed or the sample is excluded.
        floor: added to the deviation.

    Returns:
        float32 [G], 0 for invalid samples. Statistics are over valid samples. All zeros with fewer than two valid
        samples or with equal valid rewards. Computed in float64.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; floor and ddof as in TRL.
    """
    above = _above_lowest(rewards_G, valid_G)
    deviation = above.std(correction=1) if above.numel() > 1 else above.new_zeros(())
    return (_centred(rewards_G, valid_G) / (deviation + floor)).float()


def dr_grpo(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """A = R - mean of the group. Dividing by the deviation would give easy and hard prompts more weight.

    Args, returns and special cases as for `grpo`. normalize = "constant" removes the length bias.

    Source: "Understanding R1-Zero-like training" (Dr. GRPO), arXiv 2503.20783. Whitened over the batch this is the
    baseline variant of REINFORCE++, arXiv 2501.03262.
    """
    return _centred(rewards_G, valid_G).float()


def rloo(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """Leave-one-out baseline: A = R_i - mean of the other samples = G / (G - 1) (R_i - mean).

    Args, returns and special cases as for `grpo`; G counts valid samples.

    Source: "Back to basics" (RLOO), arXiv 2402.14740.
    """
    siblings = int(valid_G.sum())
    return (_centred(rewards_G, valid_G) * (siblings / max(siblings - 1, 1))).float()


def has_signal(advantages_G: Tensor) -> bool:
    """Whether any advantage is non-zero; a group without signal has no policy gradient."""
    return bool((advantages_G != 0).any())


def _centred(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """float64 [G], R - mean over valid samples; 0 for invalid samples, exactly 0 if all valid rewards are equal."""
    centred_G = torch.zeros(rewards_G.shape, dtype=torch.float64, device=rewards_G.device)
    above = _above_lowest(rewards_G, valid_G)
    if above.numel() > 1 and not equal_up_to_rounding(rewards_G[valid_G].double()):
        centred_G[valid_G] = above - above.mean()
    return centred_G


def _above_lowest(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """float64, the valid rewards minus the lowest; exact where they are close, so a common offset has no effect."""
    rewards = rewards_G[valid_G].double()
    return rewards - rewards.min() if rewards.numel() else rewards


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(
        scope="group",
        level="sample",
        function=grpo,
        deviation=True,
        formula="A = (R - mean_G) / (std_G + 1e-4), ddof 1, over valid samples",
        source="DeepSeekMath, arXiv 2402.03300",
    ),
    "dr_grpo": Advantage(
        scope="group",
        level="sample",
        function=dr_grpo,
        formula="A = R - mean_G",
        source="Dr. GRPO, arXiv 2503.20783",
    ),
    "rloo": Advantage(
        scope="group",
        level="sample",
        function=rloo,
        formula="A = G / (G - 1) (R - mean_G)",
        source="RLOO, arXiv 2402.14740",
    ),
    "reinforce_pp": Advantage(
        scope="sample",
        level="token",
        function=discounted_returns,
        settings=("gamma",),
        formula="A_t = r_t + γ A_{t+1}; whiten = true makes mean 0 and deviation 1 over the batch's tokens",
        source="REINFORCE++, arXiv 2501.03262",
    ),
    "reinforce_pp_baseline": Advantage(
        scope="group",
        level="sample",
        function=dr_grpo,
        formula="A = R - mean_G; whiten = true makes mean 0 and deviation 1 over the batch's tokens",
        source="REINFORCE++, arXiv 2501.03262",
    ),
    "gae": Advantage(
        scope="sample",
        level="token",
        function=gae,
        settings=("gamma", "lam"),
        formula="δ_t = r_t + γ V_{t+1} (1 - terminated_t) - V_t;  A_t = δ_t + γ λ (1 - ended_t) A_{t+1}",
        source="Generalized advantage estimation, arXiv 1506.02438",
    ),
}


def overlong_penalty(completion_tokens: int, *, max_new_tokens: int, buffer_tokens: int) -> float:
    """Soft length penalty min(-(L - (L_max - L_c)) / L_c, 0): falls linearly to -1 over the last L_c tokens.

    Args:
        completion_tokens: L.
        max_new_tokens: L_max, the limit of a completion.
        buffer_tokens: L_c, tokens before the limit at which the penalty starts; 0 disables it.

    Source: DAPO, arXiv 2503.14476, section 3.4.
    """
    if not buffer_tokens:
        return 0.0
    beyond = completion_tokens - (max_new_tokens - buffer_tokens)
    return min(-beyond / buffer_tokens, 0.0)
