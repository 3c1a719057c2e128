"""The controller's metrics of a batch, on examples computed by hand."""

from __future__ import annotations

import msgspec
import pytest

from tests.doubles.samples import V3, V3_AGAIN, make_delta, make_in_flight
from tests.fabricated_run import make_prompt, make_trajectory
from tidemill.controller.batching import batch_figures, sample_figures
from tidemill.core.records import Reward, Trajectory

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
