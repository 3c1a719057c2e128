"""The figures of when preemptible machines pay, and the drawing that shows them."""

from __future__ import annotations

import json

import pytest

from benchmarks.figures import fixed
from benchmarks.measuring import RESULTS
from benchmarks.simulator.when_it_pays import at_price
from tests.conftest import REPOSITORY


def test_a_price_changes_the_bill_alone() -> None:
    run = {"seconds": 1800.0, "workers_mean": 4.0, "tokens_trained": 600_000}
    # half an hour at 80 + 4 * 5 dollars: 50 dollars
    assert at_price(run, 80.0, 5.0) == pytest.approx(12_000)


def test_the_drawing_shows_the_measured_figures() -> None:
    drawing = (REPOSITORY / "docs" / "pictures" / "concept-cost.svg").read_text(encoding="utf-8")
    runs = json.loads((RESULTS / "when_it_pays.json").read_text(encoding="utf-8"))["lengths"][0]["schedules"]
    alone, with_workers = runs["colocated"], runs["tidemill"]
    for run in (alone, with_workers):
        assert f"${fixed(run['cost_usd'], 2)}<" in drawing
        assert f"{fixed(run['seconds'] / 60, 0)} minutes" in drawing
        assert f"{fixed(run['tokens_per_usd'] / 1000, 0)}k tokens per dollar" in drawing
    assert f"{fixed(with_workers['workers_mean'], 1)} machines" in drawing
    assert f"{fixed(alone['seconds'] / with_workers['seconds'], 2)} times as fast" in drawing
