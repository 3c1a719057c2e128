from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.planner.calibration.least_squares import solve, solve_with_few

NAMES = ("passes", "rows", "drawn")


def amounts(*rows: tuple[float, float, float]) -> np.ndarray:
    return np.array(rows, dtype=float)


@given(st.lists(st.floats(1e-5, 1.0), min_size=3, max_size=3))
def test_planted_costs_are_found(costs: list[float]) -> None:
    rows = amounts((1, 1, 2), (1, 4, 5), (2, 9, 30), (3, 2, 1), (5, 5, 40))
    found = solve(NAMES, rows, rows @ np.array(costs))
    assert [found.values[name] for name in NAMES] == pytest.approx(costs, rel=1e-6)
    assert (found.merged, found.count) == ((), 5)
    assert found.residual == pytest.approx(0, abs=1e-9)


def test_a_disturbed_observation_does_not_count_as_much() -> None:
    rows = np.array([[float(number), 1.0] for number in range(1, 21)])
    seconds = rows @ np.array([2.0, 1.0])
    seconds[7] *= 3
    found = solve(("passes", "rows"), rows, seconds)
    assert found.values["passes"] == pytest.approx(2.0, rel=0.01)


def test_costs_that_did_not_vary_independently_are_merged() -> None:
    # Twice as many rows as passes in every observation: 3 s a pass with its two rows.
    rows = amounts((1, 2, 0), (2, 4, 0), (4, 8, 0))
    found = solve(NAMES, rows, np.array([3.0, 6.0, 12.0]))
    assert found.merged == ("rows",)
    assert found.values == {"passes": pytest.approx(3.0), "rows": 0.0, "drawn": 0.0}


def test_nothing_gives_time_back() -> None:
    # Seconds fall where rows rise: least squares alone would say -1 for a row.
    rows = amounts((10, 1, 0), (10, 3, 0), (10, 5, 0))
    found = solve(NAMES, rows, np.array([19.0, 17.0, 15.0]))
    assert found.values["rows"] == 0.0
    # One cause left, each observation weighted with 1 / seconds: Σ 10 / Σ (100 / seconds).
    assert found.values["passes"] == pytest.approx(30 / (100 / 19 + 100 / 17 + 100 / 15), rel=0.02)


def test_errors_are_those_of_least_squares() -> None:
    # One cause, 1 of it each: the weighted mean of 1.9 and 2.1; σ² = Σ left² / seconds / (2 - 1), and the error is
    # σ / √Σ(1 / seconds).
    found = solve(("passes",), np.ones((2, 1)), np.array([1.9, 2.1]))
    mean = 2 / (1 / 1.9 + 1 / 2.1)
    variance = (1.9 - mean) ** 2 / 1.9 + (2.1 - mean) ** 2 / 2.1
    assert found.values["passes"] == pytest.approx(mean, rel=1e-3)
    assert found.errors["passes"] == pytest.approx((variance / (1 / 1.9 + 1 / 2.1)) ** 0.5, rel=0.01)


def test_of_causes_that_rise_together_the_two_that_explain_most() -> None:
    tokens = np.array([800.0, 900.0, 1000.0, 1100.0, 1200.0])
    rows = np.column_stack([np.ones(5), tokens, tokens**2])
    found = solve_with_few(("steps", "tokens", "pairs"), rows, 0.5 + 3e-7 * tokens**2)
    assert found.values == {"steps": pytest.approx(0.5), "tokens": 0.0, "pairs": pytest.approx(3e-7)}
    assert found.merged == ("tokens",)
