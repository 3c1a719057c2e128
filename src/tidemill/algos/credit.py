"""Credit of turns: one advantage for each turn of an agent's trajectory, from the turns of its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tidemill.algos.advantages import Advantage, dr_grpo
from tidemill.algos.returns import discounted_returns

STD_FLOOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTurns:
    """The turns of a group's G trajectories, which have at most N turns each."""

    rewards_GN: Tensor  # float64, whose sum is the trajectory's reward; 0 after its last turn
    reached_GN: Tensor  # bool; False after the last turn and for invalid trajectories
    states_GN: Tensor  # int64, equal where the policy saw equal states


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """An entry of `CREDITS`. `function` maps a group's turns, the run's advantage and the settings to advantages
    float32 [G, N]; 0 where no turn was reached."""

    function: Callable[..., Tensor]
    settings: tuple[str, ...]  # keys of [algorithm] passed by name
    formula: str
    source: str


def turn_returns(turns: GroupTurns, advantage: Advantage, *, turn_gamma: float) -> Tensor:
    """A_t = G_t - mean of the group's trajectories that reached turn t, G_t = Σ_{k >= t} γ^(k-t) r_k.

    Args:
        turns: of one group.
        advantage: of the run; if it divides by a deviation, A_t is divided by that of the same trajectories (ddof 1)
            plus 1e-6, the floor of `gigpo`.
        turn_gamma: γ, discount per turn.

    Returns:
        float32 [G, N]; 0 where fewer than two trajectories reached the turn.

    Source: REINFORCE with a baseline for each step, Sutton and Barto, "Reinforcement learning", section 13.4.
    """
    relative = _with_floor(advantage) if advantage.deviation else dr_grpo
    returns_GN = discounted_returns(turns.rewards_GN, gamma=turn_gamma)
    columns = zip(returns_GN.unbind(1), turns.reached_GN.unbind(1), strict=True)
    return torch.stack([relative(returns_G, reached_G) for returns_G, reached_G in columns], dim=1)


def gigpo(turns: GroupTurns, advantage: Advantage, *, turn_gamma: float, step_weight: float) -> Tensor:
    """A = A_episode + ω A_step: the advantage among the trajectories' rewards, and among the discounted returns of all
    steps of the group that start from an equal state (an anchor).

    Args:
        turns: of one group.
        advantage: of the run, for both levels: "grpo" divides by the deviation (ddof 1) plus 1e-6 (F_norm = std),
            "dr_grpo" does not (F_norm = 1).
        turn_gamma: γ, discount per turn.
        step_weight: ω.

    Returns:
        float32 [G, N]. A_step is 0 for a step whose state no other step has. A state may occur several times in one
        trajectory.

    Source: GiGPO, arXiv 2505.10978, equations 3 and 5 to 8; ddof and floor as in the authors' code
    (`gigpo/core_gigpo.py` of verl-agent). Episodes are weighed by trajectory, not by step.
    """
    relative, reached_GN = _with_floor(advantage), turns.reached_GN
    returns_GN = discounted_returns(turns.rewards_GN, gamma=turn_gamma)
    steps_GN = torch.zeros(returns_GN.shape)
    for state in turns.states_GN[reached_GN].unique():
        anchored_GN = reached_GN & (turns.states_GN == state)
        returns = returns_GN[anchored_GN]
        steps_GN[anchored_GN] = relative(returns, torch.ones_like(returns, dtype=torch.bool))
    episodes_G = relative(turns.rewards_GN.sum(1), reached_GN.any(1))
    return torch.where(reached_GN, episodes_G[:, None] + step_weight * steps_GN, 0.0)


def _with_floor(advantage: Advantage) -> Callable[[Tensor, Tensor], Tensor]:
    """The run's advantage; its deviation, if it divides by one, has the floor of turns."""
    return partial(advantage.function, floor=STD_FLOOR) if advantage.deviation else advantage.function


CREDITS: dict[str, Credit] = {
    "turn_returns": Credit(
        function=turn_returns,
        settings=("turn_gamma",),
        formula="G_t = Σ_{k >= t} γ^(k-t) r_k;  A_t = G_t - mean_t of the trajectories with a turn t; with advantage = "
        '"grpo" divided by (std_t + 1e-6), ddof 1',
        source='Sutton and Barto, "Reinforcement learning", section 13.4',
    ),
    "gigpo": Credit(
        function=gigpo,
        settings=("turn_gamma", "step_weight"),
        formula="A_t = A(R in the group) + ω A(G_t among steps with an equal state), G_t = Σ_{k >= t} γ^(k-t) r_k, "
        'ω = step_weight, A = algorithm.advantage, which is "dr_grpo" by default; with "grpo", both levels are divided '
        "by (std + 1e-6), ddof 1",
        source="GiGPO, arXiv 2505.10978",
    ),
}
