from __future__ import annotations

from tidemill.telemetry.metrics import MetricLine
from tidemill.telemetry.progress_views import SessionProgress
from tidemill.telemetry.run_data import LoggedEvaluation


def test_time_left_is_the_median_of_recent_steps() -> None:
    progress = SessionProgress(run="r", total_steps=10)
    assert progress.left_s() is None
    for step, ended_s in ((1, 30.0), (2, 34.0), (3, 40.0)):
        progress.add_step(step, {"time_step_s": 5.0}, ended_s)
    # Step 1: 5 s as measured (the time before it was loading); then 4 s and 6 s. Median 5, 7 steps left.
    assert progress.left_s() == 35.0


def test_nothing_is_left_after_the_last_step() -> None:
    progress = SessionProgress(run="r", total_steps=1)
    progress.add_step(1, {"time_step_s": 5.0}, 5.0)
    progress.add_step(2, {}, 9.0)
    assert progress.left_s() == 0


def test_evaluation_before_the_first_step_is_not_a_step() -> None:
    progress = SessionProgress(run="r", total_steps=2)
    progress.add_step(0, {"eval/reward_mean": 0.75, "eval/greedy_accuracy": 0.25, "eval/n": 64.0}, 3.0)
    assert progress.left_s() is None
    assert progress.evaluations == {0: LoggedEvaluation(0, 0.75, None, 0.25, 64)}


def test_a_restart_takes_over_history() -> None:
    progress = SessionProgress(run="r", total_steps=9)
    progress.add_step(7, {"reward_mean": 0.9}, 5.0)
    line = MetricLine(3, 3, "", 1, 1, 2.0, {"reward_mean": 0.5})
    earlier = [LoggedEvaluation(0, 0.2, None, 0.2, 8), LoggedEvaluation(3, 0.4, None, 0.4, 8)]
    progress.restart([line], earlier)
    assert progress.step == 3 and list(progress.history["reward_mean"]) == [0.5]
    assert progress.evaluations == {0: earlier[0], 3: earlier[1]}


def test_current_phases_are_unfinished_phases_of_the_step() -> None:
    progress = SessionProgress(run="r", total_steps=9)
    progress.phases |= {"rollout": (8, 8), "training": (3, 8), "evaluation": (1, 4)}
    assert progress.current_phases() == [("training", 3, 8), ("evaluation", 1, 4)]
    progress.add_step(1, {}, 1.0)
    assert progress.current_phases() == []
