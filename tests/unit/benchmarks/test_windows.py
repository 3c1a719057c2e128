"""Signs and machines of what is measured of seeding windows."""

from __future__ import annotations

import pytest

from benchmarks.simulator.windows import Effect, over, swings


def test_effects_are_relative_to_the_baseline() -> None:
    assert over([110.0, 90.0], [100.0, 100.0]) == pytest.approx((0.1, -0.1))
    # Both are 1 % off their mean: a standard deviation of sqrt(1 + 1) %, and of the mean of two, 1 %.
    assert Effect("memory added", "A", (0.01, 0.03)).told == "+2.0% ± 1.0%"


def test_places_beyond_the_few_go_and_come_back() -> None:
    changes = list(swings(1, 2, 14_400.0))
    assert [(change.time_s, change.place, change.to) for change in changes] == [
        (0.0, 0, "up"),
        (0.0, 1, "up"),
        (14_400.0, 1, "down"),
    ]
    assert [change.to for change in swings(1, 2, 7200.0)][2:] == ["down", "up", "down"]
