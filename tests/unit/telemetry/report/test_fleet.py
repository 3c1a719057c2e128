from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_fleet import FabricatedFleet
from tidemill.telemetry.report.timeline import Timeline, cost_bars, fleet_section, mean_serving, timeline
from tidemill.telemetry.run_data import RunData


def costs(reserved: float, preemptible: float, alone: float | None) -> dict[str, Any]:
    return {
        "cost_usd": reserved + preemptible,
        "cost_by_kind_usd": {"reserved": reserved, "preemptible": preemptible},
        "reserved_only_usd": alone,
    }


def test_costs_are_compared_with_reserved_machines_only() -> None:
    this, alone = cost_bars(costs(1.0, 0.5, 2.0))
    assert (this.reserved, this.preemptible, this.figure) == (50.0, 25.0, "$1.50")
    assert (alone.reserved, alone.preemptible, alone.figure) == (100.0, 0.0, "$2.00")


def test_a_run_that_cost_more_than_reserved_machines() -> None:
    this, alone = cost_bars(costs(1.0, 3.0, 2.0))
    assert (this.reserved, this.preemptible, alone.reserved) == (25.0, 75.0, 50.0)


def test_without_prices_there_are_no_cost_bars() -> None:
    assert cost_bars(costs(0.0, 0.0, None)) == []
    (this,) = cost_bars(costs(0.0, 1.0, None))
    assert (this.reserved, this.preemptible) == (0.0, 100.0)


def test_the_mean_number_of_workers_is_over_time() -> None:
    found = Timeline(
        rows=(), named=True, first_preemptible=0, bars=(), marks=(), publishes=(), sessions=(), end_s=10.0,
        serving=((0.0, 0), (2.0, 3), (4.0, 1)),
    )  # fmt: skip
    # 2 s × 0 + 2 s × 3 + 6 s × 1 = 12 worker seconds in 10 s
    assert mean_serving(found) == pytest.approx(1.2)


def test_the_fabricated_fleet_in_figures(tmp_path: Path) -> None:
    fleet = FabricatedFleet(tmp_path)
    data = RunData.load(fleet.make())
    workers = timeline(data.events, data.metrics)
    assert workers is not None
    section = fleet_section(data, workers)
    figures = {label: (figure, remark) for label, figure, remark in section["tiles"]}
    counts = fleet.counts
    assert figures["Evictions"] == (str(counts.evictions), f"{counts.noticed} with notice")
    assert figures["Samples migrated"][0] == str(counts.moved) and figures["Samples migrated"][1].endswith(
        f"{counts.lost} lost"
    )
    assert section["sentence"].startswith(f"{counts.evictions} evictions ({counts.noticed} with notice): ")
    assert figures["Workers"][1] == "mean, at most 4"
    assert len(section["costs"]) == 2 and "Quarantined" not in figures
