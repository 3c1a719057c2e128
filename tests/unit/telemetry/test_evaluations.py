from __future__ import annotations

from tidemill.telemetry.evaluations import Evaluation, evaluations
from tidemill.telemetry.metrics import MetricLine


def evaluated(step: int, accuracy: float) -> dict[str, object]:
    return {"event": "evaluation", "step": step, "greedy_accuracy": accuracy, "n": 64}


def test_both_logs_are_put_together() -> None:
    lines = [MetricLine(5, 5, "", 1, 1, 1.0, {"eval/greedy_accuracy": 0.5, "eval/n": 64.0})]
    assert evaluations([evaluated(0, 0.25)], lines) == [Evaluation(0, 0.25, 64), Evaluation(5, 0.5, 64)]


def test_what_a_resume_rewound_is_forgotten() -> None:
    events = [evaluated(0, 0.2), evaluated(5, 0.5), evaluated(10, 0.9), {"event": "resume", "step": 5}]
    assert [one.step for one in evaluations(events, [])] == [0, 5]
    assert evaluations([*events, evaluated(10, 0.8)], [])[-1] == Evaluation(10, 0.8, 64)


def test_an_evaluation_that_failed_has_no_accuracy() -> None:
    assert evaluations([{"event": "evaluation", "step": 5, "error": "OSError"}], []) == []
