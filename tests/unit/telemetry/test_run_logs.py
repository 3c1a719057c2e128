from __future__ import annotations

from pathlib import Path

from tests.fabricated_fleet import FabricatedFleet
from tidemill.telemetry.events import DECODE, EVALUATION, read_events
from tidemill.telemetry.fleet_figures import fleet_figures
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
