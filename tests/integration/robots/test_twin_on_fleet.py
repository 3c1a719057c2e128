"""Cells of a twin are chunks: the same on a fleet as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted_robots import POLICY, recipe
from tidemill.jobs.twin import run_twin


@pytest.mark.slow
def test_report_is_the_same_on_a_fleet(tmp_path: Path) -> None:
    reports = []
    for name, workers in (("local", 0), ("fleet", 2)):
        twin = {"policy": str(POLICY), "engine": "mujoco", "mass": [0.9, 1.2]}
        spec = recipe(tmp_path / name, twin=twin, pool={"kind": "static", "workers": workers})
        assert spec.is_elastic == bool(workers)
        reports.append(run_twin(spec)["product"].read_bytes())
    assert reports[0] == reports[1]
