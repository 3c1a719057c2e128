"""The controller's metrics of a batch, on examples computed by hand."""

from __future__ import annotations

import msgspec
import pytest

from tests.doubles.samples import V3, V3_AGAIN, make_delta, make_in_flight
from tests.fabricated_run import make_prompt, make_trajectory
from tests.trajectories import agent_trajectory
from tidemill.controller.batching import batch_figures, sample_figures
from tidemill.core.records import Call, Reward, Trajectory

PROMPT = make_prompt("1+1=")


def sample(completion: str, reward: Reward, finish: str = "stop", weight: float = 1.0) -> Trajectory:
    return msgspec.structs.replace(make_trajectory(PROMPT, completion, reward=reward, finish=finish), weight=weight)


def test_sample_figures() -> None:
    figures = sample_figures(
        [
            sample("1", Reward(value=1.0, components={"exact": 1.0, "length": 0.0})),
            sample("12", Reward(value=0.0, components={"exact": 0.0, "length": 0.5})),
            sample("1234", Reward(value=0.5, components={"exact": 0.5}), finish="length"),
            sample("12345", Reward(value=9.0, valid=False), weight=0.0),
        ]
    )

    # lengths 1, 2, 4, 5: mean 12/4; rewards 1, 0, .5: mean .5, variance (.25 + .25 + 0)/3
    assert figures == pytest.approx(
        {
            "completion_tokens_mean": 3.0,
            "completion_tokens_max": 5.0,
            "truncated_fraction": 0.25,
            "samples": 4.0,
            "samples_invalid": 1.0,
            "samples_left_out": 1.0,
            "reward_mean": 0.5,
            "reward_std": (0.5 / 3) ** 0.5,
            "reward/exact": 0.5,
            "reward/length": 0.25,
        }
    )


def test_without_a_valid_reward_there_is_no_mean() -> None:
    figures = sample_figures([sample("1", Reward(value=0.0, valid=False))])

    assert figures["samples_invalid"] == 1.0
    assert "reward_mean" not in figures


def test_a_single_component_is_not_reported() -> None:
    assert "reward/exact" not in sample_figures([sample("1", Reward(value=1.0, components={"exact": 1.0}))])


def test_batch_figures_count_tokens_of_recomputed_versions() -> None:
    one = make_in_flight()
    one.assign("lease")
    one.apply(make_delta(version=V3_AGAIN))
    one.apply(make_delta(start=2, tokens=[1, 2, 3]))
    one.apply(make_delta(start=2))

    figures = batch_figures(list(one), one.counters, V3)

    assert figures["tokens_generated"] == 5.0
    assert figures["tokens_other_weights"] == 2.0
    assert figures["deltas_ignored"] == 1.0
    assert figures["tokens_recovered"] == 0.0


def test_agents_have_turns_calls_and_ends() -> None:
    call = Call(call_id="c", name="add", arguments="{}")
    one = agent_trajectory(
        [1], [("action", [2]), ("observation", [3]), ("action", [4])], [0.0, 1.0], episode_end="done"
    )
    one = msgspec.structs.replace(one, turns=(msgspec.structs.replace(one.turns[0], calls=(call,)), one.turns[1]))
    lost = agent_trajectory([1], [("action", [2])], [0.0], valid=False, episode_end="fault", fault="gone")
    figures = sample_figures([one, one, one, lost])
    # 2, 2, 2 and 1 turns; 1, 1, 1 and 0 calls
    assert (figures["turns_mean"], figures["calls_mean"]) == (1.75, 0.75)
    assert (figures["episodes_ended/done"], figures["episodes_ended/fault"]) == (0.75, 0.25)
    assert figures["episodes_ended/turns"] == 0.0
    assert (figures["samples_invalid"], figures["samples_left_out"]) == (0.0, 1.0)  # no reward failed


def test_single_completions_have_no_figures_of_agents() -> None:
    one = make_in_flight()
    figures = sample_figures([sample("1", Reward(value=1.0))]) | batch_figures(list(one), one.counters, V3)
    assert not [name for name in figures if "turns" in name or "episodes" in name or "env" in name]
