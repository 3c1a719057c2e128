"""A constant added to every reward does not change advantages that compare samples, however large it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.trajectories import agent_trajectory, group
from tidemill.config.schema import RunSpec
from tidemill.core.records import Trajectory
from tidemill.trainer.advantage_estimator import AdvantageEstimator, GroupAdvantages
from tidemill.trainer.critic import resolved

Rewards = list[tuple[float, float]]  # of two turns
# Multiples of 1/64, exact after adding an offset of up to 2**44.
NUMBERS = st.integers(-256, 256).map(lambda n: n / 64)
GROUPS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=8)
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "dr_grpo"},
    {"name": "rloo"},
    {"name": "grpo", "overlong_buffer_tokens": 4},
    {"name": "reinforce_pp", "whiten": True, "kl_beta": 0.0},
    {"name": "ppo", "whiten": True, "lam": 1.0, "kl_beta": 0.0},  # with a critic that has not learned anything
    {"advantage": "reinforce_pp_baseline", "whiten": True},
    {"name": "grpo", "credit": "turn_returns", "turn_gamma": 1.0},
    {"name": "dr_grpo", "credit": "turn_returns", "turn_gamma": 1.0},
    {"name": "grpo", "credit": "gigpo", "advantage": "grpo", "turn_gamma": 1.0},
    {"name": "dr_grpo", "credit": "gigpo", "turn_gamma": 1.0},
]


USERS = [{"advantage": f"{__name__}:{name}", "whiten": True} for name in ("centred", "of_tokens")]


def centred(rewards: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    advantages = torch.zeros(len(rewards))
    advantages[valid] = rewards[valid] - rewards[valid].mean()
    return advantages


def of_tokens(rewards: torch.Tensor, lengths: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    return [np.full(int(tokens), float(reward)) for reward, tokens in zip(rewards, lengths, strict=True)]


def member(rewards: Sequence[float], index: int) -> Trajectory:
    """Two turns of one token each; every first turn sees the same state."""
    parts = [("action", [10]), ("observation", [20]), ("action", [11])]
    return agent_trajectory([5, 6], parts, rewards, index=index, states=["start", "next"])  # type: ignore[arg-type]


def estimated(algorithm: dict[str, Any], rewards: Rewards, offset: float) -> GroupAdvantages:
    sections = {"env": {"name": "guess"}, "batch": {"prompts": 1, "group_size": len(rewards)}}
    spec = RunSpec.model_validate({"algorithm": algorithm, "sampling": {"max_new_tokens": 4}, **sections})
    members = [member((first, last + offset), index) for index, (first, last) in enumerate(rewards)]
    values = (lambda microbatch: resolved(torch.zeros(microbatch.tokens))) if spec.algorithm.needs_critic else None
    estimator = AdvantageEstimator(spec, torch.device("cpu"), values=values)
    return estimator.estimate([group(0, members)], [[True] * len(members)], kl_beta=0.0)[0]


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *USERS], ids=str)
@settings(max_examples=10)
@given(rewards=GROUPS, offset=st.sampled_from([1e9, -1e9, 2.0**40]))
def test_an_offset_of_every_reward_changes_nothing(algorithm: dict[str, Any], rewards: Rewards, offset: float) -> None:
    assume(len({sum(each) for each in rewards}) > 1)
    plain, moved = (estimated(algorithm, rewards, each) for each in (0.0, offset))
    assert moved.signal
    for one, other in zip(plain.samples, moved.samples, strict=True):
        np.testing.assert_allclose(other.advantage, one.advantage, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", [each for each in ALGORITHMS if "kl_beta" not in each], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_rewards_that_differ_by_rounding_have_no_signal(algorithm: dict[str, Any], offset: float) -> None:
    """0.1 + 0.2 and 0.3 differ in double precision."""
    found = estimated(algorithm, [(0.3, 0.0), (0.3, 0.1 + 0.2 - 0.3)], offset)
    for sample in found.samples:
        assert not np.any(sample.advantage)
