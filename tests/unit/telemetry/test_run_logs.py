from __future__ import annotations

from pathlib import Path

import pytest

from tests.fabricated_fleet import FabricatedFleet
from tidemill.telemetry import run_logs
from tidemill.telemetry.events import DECODE, EVALUATION, read_events
from tidemill.telemetry.fleet_figures import fleet_figures
from tidemill.telemetry.report.sections import fleet_data
from tidemill.telemetry.run_data import RunData


def test_figures_are_those_of_all_events(tmp_path: Path) -> None:
    data = RunData.load(FabricatedFleet(tmp_path).make())
    events = read_events(data.run.events)
    assert list(data.events) == events and len(data.events) == len(events)
    assert len(data.events.outline) < len(events)
    figures = fleet_figures(
        events,
        data.metrics,
        wall_s=data.summary["wall_s"],
        tokens_trained=data.summary["tokens_trained"],
        reserved_usd_per_hour=data.setting("fleet", "reserved_usd_per_hour"),
    )
    assert figures["reserved_only_usd"] and figures.items() <= data.summary.items()
    for name in (DECODE, EVALUATION):
        assert data.events_named(name) == [event for event in events if event["event"] == name]


def test_the_timeline_of_a_long_run_has_its_newest_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FabricatedFleet(tmp_path).make()
    (whole,) = fleet_data(RunData.load(run), whole=True)["fleets"]
    monkeypatch.setattr(run_logs, "RECENT_BYTES", 20_000)
    data = RunData.load(run)
    (newest,) = fleet_data(data)["fleets"]
    assert data.events.recent == read_events(run.events)[-len(data.events.recent) :]
    assert newest["workFrom"] and not whole["workFrom"]
    assert newest["marks"] == whole["marks"] and newest["rows"] == whole["rows"]
    assert 0 < len(newest["bars"]) < len(whole["bars"])
    assert all(bar in whole["bars"] for bar in newest["bars"])
    assert fleet_data(data, whole=True)["fleets"] == [whole]
