"""From rewards to advantages: one function for each estimator, and the shaping of rewards before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tidemill.algos.returns import discounted_returns, gae

Scope: TypeAlias = Literal["sample", "group", "batch"]
"""What must be complete before the advantage of any sample in it is known."""

STD_FLOOR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """A row of the registry.

    `function` takes, of level "sample", rewards float [G] and valid bool [G] of a group and gives float32 [G], one
    number for all tokens of a sample; of level "token", the rewards float [..., T] of a sample's tokens (and what else
    its own signature asks for) and gives float [..., T].
    """

    scope: Scope  # without whitening, which makes it "batch"
    level: Literal["sample", "token"]
    function: Callable[..., Tensor]
    settings: tuple[str, ...] = ()  # keys of [algorithm] that it is given by name
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
    centred = _centred(rewards_G, valid_G)
    rewards = rewards_G[valid_G].double()
    deviation = rewards.std(correction=1) if rewards.numel() > 1 else rewards.new_zeros(())
    return (centred / (deviation + STD_FLOOR)).float()


def dr_grpo(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """A = R - mean of the group: no division, which would weigh easy and hard prompts up.

    Args, returns and special cases as for `grpo`. The length bias is removed by normalize = "constant".

    Source: "Understanding R1-Zero-like training" (Dr. GRPO), arXiv 2503.20783. Whitened over the batch it is the
    baseline variant of REINFORCE++, arXiv 2501.03262.
    """
    return _centred(rewards_G, valid_G).float()


def rloo(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """Each sample against the mean of its siblings: A = R_i - mean of the others = G / (G - 1) (R_i - mean).

    Args, returns and special cases as for `grpo`; G counts valid samples.

    Source: "Back to basics" (RLOO), arXiv 2402.14740.
    """
    siblings = int(valid_G.sum())
    return (_centred(rewards_G, valid_G) * (siblings / max(siblings - 1, 1))).float()


def has_signal(advantages_G: Tensor) -> bool:
    """Whether any sample of the group moves the policy: False for a group to be skipped."""
    return bool((advantages_G != 0).any())


def scope_of(name: str, *, whiten: bool) -> Scope:
    """What must be complete before anything can be learned from a sample."""
    return "batch" if whiten else ADVANTAGES[name].scope


def _centred(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """float64 [G], R - mean over valid samples; 0 for the others, and exactly 0 where all valid rewards are equal."""
    centred_G = torch.zeros(rewards_G.shape, dtype=torch.float64, device=rewards_G.device)
    rewards = rewards_G[valid_G].double()  # in double, so that a common offset does not eat the differences
    if rewards.numel() > 1 and not bool((rewards == rewards[0]).all()):
        centred_G[valid_G] = rewards - rewards.mean()
    return centred_G


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(
        scope="group",
        level="sample",
        function=grpo,
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
    """0 up to `max_new_tokens - buffer_tokens`, then falling linearly to -1 at `max_new_tokens`:
    min(-(L - (L_max - L_c)) / L_c, 0).

    Args:
        completion_tokens: L.
        max_new_tokens: L_max, the limit of a completion.
        buffer_tokens: L_c, how long before the limit the penalty begins; 0 for none.

    Source: DAPO, arXiv 2503.14476, section 3.4.
    """
    if not buffer_tokens:
        return 0.0
    beyond = completion_tokens - (max_new_tokens - buffer_tokens)
    return min(-beyond / buffer_tokens, 0.0)
