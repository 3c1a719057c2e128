"""Rewards of turns from trajectories to advantages of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.model_shapes import llama
from tests.trajectories import Part, agent_trajectory, group, trajectory
from tidemill.config.schema import RunSpec
from tidemill.core.records import Trajectory, pack_logprobs
from tidemill.models.attention import use_packed_attention
from tidemill.models.tree_forward import TreeForward
from tidemill.runtime.compute import ComputeThread
from tidemill.trainer.advantage_estimator import AdvantageEstimator, GroupAdvantages
from tidemill.trainer.policy import PolicyTrainer

PROMPT = [5, 6]
# turns of 2, 1 and 3 tokens, the last one in a context of its own
PARTS: list[Part] = [
    ("action", [10, 11]), ("observation", [20, 21, 22]), ("action", [12]), ("observation", [23]),
    ("context", [5, 6, 7]), ("action", [13, 14, 15]),
]  # fmt: skip
MEAN_ONLY = {"name": "dr_grpo", "credit": "turn_returns", "turn_gamma": 0.5}


def spec(algorithm: dict[str, Any], **sections: Any) -> RunSpec:
    sections = {"env": {"name": "guess"}, "batch": {"prompts": 1, "group_size": 2}, **sections}
    return RunSpec.model_validate({"algorithm": algorithm, **sections})


def agent(turns: int, rewards: Sequence[float], **fields: Any) -> Trajectory:
    """The first 1 to 3 of the turns above."""
    end = [at for at, (role, _) in enumerate(PARTS, 1) if role == "action"][turns - 1]
    return agent_trajectory(PROMPT, PARTS[:end], rewards, **fields)


def estimated(
    algorithm: dict[str, Any], *members: Trajectory, kl_beta: float = 0.0, **sections: Any
) -> GroupAdvantages:
    estimator = AdvantageEstimator(spec(algorithm, **sections), torch.device("cpu"))
    valid = [t.weight > 0 for t in members]
    (found,) = estimator.estimate([group(0, members)], [valid], kl_beta=kl_beta)
    return found


def advantages(algorithm: dict[str, Any], *members: Trajectory, **options: Any) -> list[list[float]]:
    """[T] of each valid member."""
    found = estimated(algorithm, *members, **options)
    lengths = [sample.trajectory.trained_length for sample in found.samples]
    return [np.broadcast_to(sample.advantage, (n,)).tolist() for sample, n in zip(found.samples, lengths, strict=True)]


def test_every_token_of_a_turn_has_the_advantage_of_the_turn() -> None:
    # returns with γ = 0.5: (1 + 0.5 * (0 + 0.5 * 4), 0 + 0.5 * 4, 4) = (2, 2, 4) and (3 + 0.5 * 4, 4) = (5, 4)
    # turn 0: mean 3.5; turn 1: mean 3; turn 2: one trajectory
    long, short = advantages(MEAN_ONLY, agent(3, [1, 0, 4]), agent(2, [3, 4], index=1))
    assert long == pytest.approx([-1.5, -1.5, -1.0, 0, 0, 0])
    assert short == pytest.approx([1.5, 1.5, 1.0])


def test_outcome_is_the_advantage_of_the_total() -> None:
    long, short = advantages({"name": "dr_grpo"}, agent(3, [1, 0, 4]), agent(2, [3, 4], index=1))
    assert (long, short) == ([-1.0] * 6, [1.0] * 3)  # 5 and 7, mean 6


def test_rewards_that_no_turn_has_belong_to_the_last_turn() -> None:
    # turns (1, 0, 4) with a total of 7: the last turn has 6; returns (1 + 0.25 * 6, 3, 6) = (2.5, 3, 6)
    # a failure with the outcome -1 after rewards (3, 4): (3, -4), returns (1, -4); means 1.75 and -0.5
    failed = agent(2, [3, 4], index=1, total=-1.0, outcome=-1.0, episode_end="failure")
    long, short = advantages(MEAN_ONLY, agent(3, [1, 0, 4], total=7.0), failed)
    assert long == pytest.approx([0.75, 0.75, 3.5, 0, 0, 0])
    assert short == pytest.approx([-0.75, -0.75, -3.5])


def test_the_overlong_penalty_counts_generated_tokens() -> None:
    """The longer one has 6 generated tokens among 13; the penalty starts at 8 - 4 = 4 and is 2 / 4 there."""
    shaping = {"overlong_buffer_tokens": 4}
    sections = {"sampling": {"max_new_tokens": 8}}
    members = (agent(3, [0, 0, 1]), agent(2, [0, 1], index=1))
    assert members[0].completion_length == 13
    long, short = advantages({"name": "dr_grpo", **shaping}, *members, **sections)
    assert (long, short) == ([-0.25] * 6, [0.25] * 3)  # 0.5 and 1
    # by turns: the last turn has 0.5; returns (0.125, 0.25, 0.5) and (0.5, 1)
    long, short = advantages({**MEAN_ONLY, **shaping}, *members, **sections)
    assert long == pytest.approx([-0.1875] * 2 + [-0.375] + [0] * 3)


def test_the_kl_penalty_is_subtracted_from_the_turn_of_its_tokens() -> None:
    """Rollout logprobs are -1, those of the reference -1 except -3 and -2 in the first and last turn: penalties of
    0.5 * 2 = 1 in turn 0 and 0.5 * 1 in turn 2."""
    ref = pack_logprobs([-1, -3, -1, -1, -1, -2])
    first = agent(3, [2, 0, 1], ref_logprobs=ref)
    second = agent(3, [0, 0, 0], index=1, ref_logprobs=pack_logprobs([-1] * 6))
    algorithm = {"name": "dr_grpo", "credit": "turn_returns", "turn_gamma": 1.0, "kl_beta": 0.5, "kl_in": "reward"}
    # rewards (1, 0, 0.5): returns (1.5, 0.5, 0.5) against 0
    found = advantages(algorithm, first, second, kl_beta=0.5)
    assert found[0] == pytest.approx([0.75, 0.75, 0.25, 0.25, 0.25, 0.25])
    assert found[1] == pytest.approx([-0.75, -0.75, -0.25, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("credit", ["outcome", "turn_returns", "gigpo"])
def test_a_member_with_a_fault_has_no_part_in_the_group(credit: str) -> None:
    members = (agent(3, [1, 0, 4]), agent(2, [3, 4], index=1))
    lost = agent(1, [100.0], index=2, total=0.0, valid=False, fault="the tool did not start", episode_end="fault")
    without_turns = msgspec.structs.replace(trajectory(PROMPT, [], 0.0, index=3, valid=False, weight=0.0), fault="x")
    algorithm = {**MEAN_ONLY, "credit": credit}
    assert advantages(algorithm, *members, lost, without_turns) == advantages(algorithm, *members)


def test_gigpo_compares_equal_states() -> None:
    # episodes 5 and 7: -1, 1. State "s" with γ = 0.5: returns 2 (first, turn 0), 4 (first, turn 2), 5 (second, turn 0):
    # mean 11/3; the others are alone.
    algorithm = {"credit": "gigpo", "turn_gamma": 0.5}
    long, short = advantages(
        algorithm, agent(3, [1, 0, 4], states=["s", "a", "s"]), agent(2, [3, 4], states=["s", "b"], index=1)
    )
    assert long == pytest.approx([-1 - 5 / 3] * 2 + [-1] + [-1 + 1 / 3] * 3)
    assert short == pytest.approx([1 + 4 / 3] * 2 + [1])


@pytest.mark.parametrize(("credit", "signal"), [("outcome", False), ("turn_returns", True), ("gigpo", True)])
def test_signal_is_that_of_the_turns(credit: str, signal: bool) -> None:
    """Both get 2 in all, one of them earlier."""
    members = [agent(2, [2, 0], states=["s", "t"]), agent(2, [0, 2], states=["s", "t"], index=1)]
    algorithm = {"name": "dr_grpo", "credit": credit}
    assert estimated(algorithm, *members).signal is signal
    model = llama()
    use_packed_attention(model)
    subject = PolicyTrainer(TreeForward(model), spec(algorithm), compute=ComputeThread(), source=Path())
    subject.add_group(group(0, members))
    values = subject.finish_batch(1).values
    assert (values["groups_without_signal"], values["tokens_trained"]) == ((0, 6) if signal else (1, 0))


def test_a_group_whose_turns_are_equal_has_no_signal() -> None:
    members = [agent(3, [1, 0, 2]), agent(3, [1, 0, 2], index=1)]
    assert not estimated({"credit": "turn_returns"}, *members).signal


def test_token_level_advantages_get_the_reward_of_each_turn_at_its_last_token() -> None:
    """Token returns with γ = 0.5 of rewards (0, 1 | 2 | 0, 0, 5), of which 1 is not a reward of a turn."""
    (found,) = advantages(
        {"name": "reinforce_pp", "gamma": 0.5, "whiten": False, "kl_beta": 0.0}, agent(3, [1, 2, 4], total=8.0)
    )
    # from the end: 5, 2.5, 1.25, 2 + 0.625, 1 + 1.3125, 1.15625
    assert found == pytest.approx([1.15625, 2.3125, 2.625, 1.25, 2.5, 5])


def test_samples_are_weighed_by_trajectory() -> None:
    """normalize = "sample": one over the generated tokens, and the number of trajectories, whatever their rows."""
    seen: list[float] = []
    model = llama()
    use_packed_attention(model)
    subject = PolicyTrainer(
        TreeForward(model), spec(MEAN_ONLY | {"normalize": "sample"}), compute=ComputeThread(), source=Path()
    )
    subject._add_samples = lambda index, samples: seen.extend(s.token_weight for s in samples)  # type: ignore[method-assign]
    subject.add_group(group(0, [agent(3, [1, 0, 4]), agent(2, [3, 4], index=1)]))
    assert seen == [1 / 6, 1 / 3]
    assert subject._minibatches[0].denominator == 2
