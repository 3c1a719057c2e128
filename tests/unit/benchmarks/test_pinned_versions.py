from __future__ import annotations

import pytest

from benchmarks.pinned_versions import check_versions, simulated


def test_samples_that_are_not_as_the_schedule_says_fail() -> None:
    check_versions("continue", [1, 2])
    check_versions("wait", [1, 1])
    with pytest.raises(RuntimeError, match="continue: no samples of several versions"):
        check_versions("continue", [1, 1])
    with pytest.raises(RuntimeError, match="wait: 1 samples have tokens of several versions"):
        check_versions("wait", [1, 2])


def test_both_schedules_train_on_the_same_tokens() -> None:
    assert simulated(1, 400.0, "continue")[2] == simulated(1, 400.0, "wait")[2] > 0
