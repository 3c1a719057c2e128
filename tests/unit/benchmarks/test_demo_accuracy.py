from __future__ import annotations

import pytest

from benchmarks.demo_accuracy import Outcome, check_control


def outcome(after: float) -> Outcome:
    return Outcome(seed=1, before=0.25, after=after, n=40, training_s=1.0, wall_s=1.0, peak_rss_bytes=1)


def test_a_control_that_learns_fails() -> None:
    check_control([outcome(0.05), outcome(0.4)])  # 95 % intervals (Wilson) of 10 and 16 of 40: 0.14-0.40, 0.26-0.55
    with pytest.raises(RuntimeError, match=r"seed 1: random rewards raise the accuracy from 0.25 to 0.9"):
        check_control([outcome(0.05), outcome(0.9)])
