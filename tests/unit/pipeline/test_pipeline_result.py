from __future__ import annotations

from typing import Any

import pytest

from tidemill.pipeline.pipeline_result import measured, pipeline_result


def stage(name: str, kind: str, state: str = "done", *, model: str = "char", **figures: Any) -> dict[str, Any]:
    return {
        "name": name, "kind": kind, "state": state, "model": model, "figures": figures, "headline": "40 steps",
    }  # fmt: skip


SFT = stage("sft", "sft", loss=1.25, n=64)
PAIRS = stage("pairs", "pairs", rows=90)
RM = stage("rm", "reward_model", model="stage:sft", loss=0.5, pairwise_accuracy=0.9, n=64)
RL = stage("ppo", "rl", model="stage:sft", greedy_accuracy_before=0.25, greedy_accuracy=0.75, n=64, reward_mean=0.8)
TEST = stage("test", "eval", model="stage:ppo", greedy_accuracy=0.5, n=200)
COMPARED = stage(
    "test", "eval", model="stage:ppo", greedy_accuracy=0.5, n=200,
    greedy_accuracy_difference=-0.125, greedy_accuracy_difference_interval=[-0.25, 0.0],
)  # fmt: skip
BASE = stage("base", "eval", model="char", greedy_accuracy=0.1, n=200)
OUT = stage("out", "export", model="stage:ppo", bytes=7)
WALK = stage("walk", "control", success_before=0.0, success=0.75, return_mean_before=-1.0, return_mean=8.0, n=64)
MEASURED = stage("walk", "control", return_mean_before=-1.0, return_mean=8.0)
TWIN = stage("twin", "twin") | {"headline": "passed in 9 of 9 cells"}
BUNDLE = stage("files", "bundle") | {"headline": "7 files"}
ROSE = "Held-out accuracy rose from 0.250 to 0.750 in ppo."


def unfinished(name: str, kind: str, state: str) -> dict[str, Any]:
    return stage(name, kind, state, model="stage:sft")


@pytest.mark.parametrize(
    ("stages", "main", "headline"),
    [
        ([SFT], "sft", "Held-out loss of sft is 1.250."),
        ([SFT, RL], "ppo", ROSE),
        ([SFT, PAIRS, RM, RL, OUT], "ppo", ROSE),
        ([SFT, RL, RM], "ppo", ROSE),  # a reward model is a means
        ([SFT, RM, RL, TEST], "ppo", "Held-out accuracy of ppo is 0.500."),
        ([SFT, RL, TEST, BASE], "ppo", "Held-out accuracy of ppo is 0.500."),  # not that of another model
        ([SFT, RL, OUT, {**TEST, "model": "stage:out"}], "ppo", "Held-out accuracy of ppo is 0.500."),
        (
            [SFT, RL, COMPARED],
            "ppo",
            "Held-out accuracy of ppo is 0.500, 0.125 below that of the other model (95 %: -0.250 to 0.000).",
        ),
        # Distillation: the last policy is the student.
        ([RL, PAIRS, stage("student", "sft", loss=0.5)], "student", "Held-out loss of student is 0.500."),
        ([SFT, PAIRS, RM], "sft", "Held-out loss of sft is 1.250."),
        ([PAIRS, RM], "rm", "Held-out pairwise accuracy of rm is 0.900."),
        ([PAIRS, stage("dpo", "dpo", pairwise_accuracy=0.75)], "dpo", "Held-out pairwise accuracy of dpo is 0.750."),
        ([BASE], "base", "Held-out accuracy of base is 0.100."),
        ([stage("sft", "sft")], "sft", "sft is finished: 40 steps."),
        ([PAIRS], "pairs", "pairs is finished: 40 steps."),
        ([SFT, unfinished("ppo", "rl", "failed")], "ppo", "ppo failed. So far: Held-out loss of sft is 1.250."),
        ([SFT, unfinished("ppo", "rl", "due")], "ppo", "ppo has not started. So far: Held-out loss of sft is 1.250."),
        (
            [SFT, unfinished("rm", "reward_model", "failed"), unfinished("ppo", "rl", "due")],
            "ppo",
            "rm failed; ppo has not started. So far: Held-out loss of sft is 1.250.",
        ),
        (
            [unfinished("sft", "sft", "running"), unfinished("ppo", "rl", "due")],
            "ppo",
            "sft is running; ppo has not started.",
        ),
        ([SFT, unfinished("ppo", "rl", "left out")], "sft", "Held-out loss of sft is 1.250."),  # --only sft
        ([], "", "No stage has been started."),
        ([WALK], "walk", "Success rose from 0.000 to 0.750 in walk."),
        ([MEASURED], "walk", "Mean return went from -1.000 to 8.000 in walk."),
        (
            [WALK, TWIN, BUNDLE],
            "walk",
            ("Success rose from 0.000 to 0.750 in walk. twin is finished: passed in 9 of 9 cells. "
            "files is finished: 7 files."),
        ),
        (
            [WALK, TWIN, unfinished("files", "bundle", "failed")],
            "walk",
            "Success rose from 0.000 to 0.750 in walk. twin is finished: passed in 9 of 9 cells. files failed.",
        ),
        ([TWIN], "twin", "twin is finished: passed in 9 of 9 cells."),  # of a policy from elsewhere
    ],
)  # fmt: skip
def test_the_result_is_of_the_model_that_the_pipeline_is_for(
    stages: list[dict[str, Any]], main: str, headline: str
) -> None:
    found = pipeline_result(stages)
    assert (found.main, found.headline) == (main, headline)


def test_a_change_within_sampling_error_is_not_called_one() -> None:
    close = stage("ppo", "rl", greedy_accuracy_before=0.5, greedy_accuracy=0.625, n=8)
    assert pipeline_result([close]).headline.endswith("which is within sampling error.")


def test_the_interval_of_a_figure_is_the_recorded_one() -> None:
    assert measured({"reward_mean": 1.5, "reward_mean_interval": [1.0, 2.0]}, "reward_mean").interval == (1.0, 2.0)
    assert measured({"reward_mean": 0.5, "n": 3}, "reward_mean").interval is None  # not a share
    # Wilson's: 3 / (3 + 1.96²) = 0.43849.
    share = measured({"pairwise_accuracy": 1.0, "n": 3}, "pairwise_accuracy").interval
    assert share == pytest.approx((0.43849, 1.0), abs=1e-4)
