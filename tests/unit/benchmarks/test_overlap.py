from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.overlap import check_runs, expected, overlap_of
from tidemill.telemetry.metrics import MetricLine


def step(number: int, **values: float) -> MetricLine:
    return MetricLine(
        step=number,
        policy_version=number,
        weights_digest="",
        optimizer_steps=1,
        session=1,
        elapsed_s=0.0,
        values=values,
    )


def test_the_references_figures() -> None:
    assert expected(60, 40) == pytest.approx((0.4, 2 / 3))  # 40 / 100; 40 / 60
    assert expected(40, 60) == pytest.approx((0.6, 1.0))  # generation hides behind learning


def test_shares_are_of_the_time_of_all_steps_together() -> None:
    common = {"samples": 64, "time_rollout_s": 2.0, "policy_lag_mean": 0.5}
    lines = [
        step(4, time_step_s=3.0, time_trainer_idle_s=2.0, time_train_s=1.0, tokens_trained=100, **common),
        step(5, time_step_s=1.0, time_trainer_idle_s=0.0, time_train_s=0.5, tokens_trained=300, **common),
    ]
    found = overlap_of(lines, 1, 0)
    assert (found.samples, found.trained_tokens, found.seconds) == (128, 400, 4.0)
    assert (found.idle_share, found.busy_share) == (0.5, 0.375)  # 2 / 4 and 1.5 / 4
    assert (found.step_s, found.tokens_per_s, found.rollout_s, found.lag_mean) == (2.0, 100.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("lag", "broken", "why"),
    [
        (1, {"lag_mean": 0.0}, "round 0, lag 1: no tokens of an earlier version"),
        (0, {"lag_mean": 0.5}, "round 0, lag 0: trained on tokens of an earlier version"),
        (1, {"samples": 63}, "different numbers of samples"),
    ],
)
def test_runs_that_do_not_overlap_or_differ_in_work_fail(lag: int, broken: dict[str, Any], why: str) -> None:
    common = {"samples": 64, "time_rollout_s": 2.0, "time_step_s": 3.0, "time_trainer_idle_s": 2.0}
    lines = [step(4, time_train_s=1.0, tokens_trained=100, policy_lag_mean=0.9, **common)]
    runs = {1: overlap_of(lines, 1, 0), 0: replace(overlap_of(lines, 0, 0), lag_mean=0.0)}
    check_runs(list(runs.values()))
    with pytest.raises(RuntimeError, match=why):
        check_runs(list((runs | {lag: replace(runs[lag], **broken)}).values()))
