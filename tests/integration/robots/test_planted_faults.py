"""Mistakes of transfer are refused, and harmless changes accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planted_robot_faults import ACCEPTED, CONTROLS, FAULTS, run, verdict
from tests.planted_robots import POLICY

FAST = ("terms reordered with their columns", "delay of 5 ms")


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "permuted joints"])  # the cart has one
def test_fault_is_refused(name: str, tmp_path: Path) -> None:
    assert verdict(POLICY, FAULTS[name], work=tmp_path) != ACCEPTED


@pytest.mark.parametrize("name", FAST)
def test_control_is_accepted(name: str, tmp_path: Path) -> None:
    assert verdict(POLICY, CONTROLS[name], work=tmp_path) == ACCEPTED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_and_controls_in_newton(tmp_path: Path) -> None:
    found = run(POLICY, engine="newton", work=tmp_path)
    wrong = {name: reason for name, (wanted, reason) in found.items() if (reason == ACCEPTED) != wanted}
    assert not wrong
    assert sum(not wanted for wanted, _ in found.values()) >= 12
    assert sum(wanted for wanted, _ in found.values()) >= 12
