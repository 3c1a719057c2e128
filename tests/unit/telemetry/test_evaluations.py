from __future__ import annotations

import pytest

from tidemill.telemetry.metrics import MetricLine
from tidemill.telemetry.run_data import LoggedEvaluation, comparable, evaluations
from tidemill.telemetry.statistics import wilson_interval


def evaluated(step: int, reward: float, accuracy: float | None = None) -> dict[str, object]:
    fields = {"event": "evaluation", "step": step, "reward_mean": reward, "reward_stderr": 0.05, "n": 64}
    return fields if accuracy is None else fields | {"greedy_accuracy": accuracy}


def test_evaluations_are_read_from_both_logs() -> None:
    values = {"eval/reward_mean": 0.75, "eval/reward_stderr": 0.1, "eval/greedy_accuracy": 0.5, "eval/n": 64.0}
    lines = [MetricLine(5, 5, "", 1, 1, 1.0, values | {"reward_mean": 0.9})]
    assert evaluations([evaluated(0, 0.25)], lines) == [
        LoggedEvaluation(0, 0.25, 0.05, None, 64),
        LoggedEvaluation(5, 0.75, 0.1, 0.5, 64),
    ]


@pytest.mark.parametrize(
    "rewound",
    [{"event": "resume", "step": 5}, {"event": "guard", "action": "rollback", "step": 10, "target": 5, "number": 1}],
)
def test_evaluations_rewound_by_a_resume_or_a_rollback_are_dropped(rewound: dict[str, object]) -> None:
    events = [evaluated(0, 0.2), evaluated(5, 0.5), evaluated(10, 0.9), rewound]
    assert [one.step for one in evaluations(events, [])] == [0, 5]
    assert evaluations([*events, evaluated(10, 0.8)], [])[-1] == LoggedEvaluation(10, 0.8, 0.05, None, 64)


def test_evaluations_of_other_sets_are_separate() -> None:
    events = [evaluated(0, 0.25), evaluated(0, 0.75) | {"set": "math"}]
    lines = [MetricLine(5, 5, "", 1, 1, 1.0, {"eval/reward_mean": 0.5, "eval/math/reward_mean": 1.0})]
    assert [one.reward_mean for one in evaluations(events, lines)] == [0.25, 0.5]
    assert [one.reward_mean for one in evaluations(events, lines, "math")] == [0.75, 1.0]


def test_a_failed_evaluation_is_skipped() -> None:
    assert evaluations([{"event": "evaluation", "step": 5, "error": "OSError"}], []) == []


def test_evaluations_are_compared_by_a_figure_all_of_them_have() -> None:
    binary, graded = LoggedEvaluation(0, 0.75, 0.1, 0.5, 64), LoggedEvaluation(5, 1.5, 0.25, None, 64)
    assert comparable([binary]) == [("accuracy", 0.5, wilson_interval(0.5, 64))]
    first, last = comparable([binary, graded])
    assert (first.name, first.value, last.name, last.value) == ("mean reward", 0.75, "mean reward", 1.5)
    assert last.interval == pytest.approx((1.5 - 1.96 * 0.25, 1.5 + 1.96 * 0.25), abs=1e-4)
    assert comparable([LoggedEvaluation(0, 0.9, None, None, 1)])[0].interval is None


@pytest.mark.parametrize(
    ("recorded", "stderr", "interval"),
    [
        ({"reward_mean_interval": [0.4, 1.0]}, 0.1, (0.4, 1.0)),
        ({}, 0.1, (0.9 - 1.96 * 0.1, 0.9 + 1.96 * 0.1)),  # of an earlier version
        ({}, 0.0, None),  # equal rewards
        ({}, None, None),  # a single one
        ({"reward_mean_interval": None}, 0.0, None),
    ],
)
def test_the_recorded_interval_of_the_mean_is_used(
    recorded: dict[str, object], stderr: float | None, interval: tuple[float, float] | None
) -> None:
    fields = {"event": "evaluation", "step": 0, "reward_mean": 0.9, "reward_stderr": stderr, "n": 3}
    ((found,),) = [evaluations([fields | recorded], [])]
    assert found.reward_interval == (pytest.approx(interval) if interval else None)
    assert comparable([found])[0].interval == found.reward_interval
