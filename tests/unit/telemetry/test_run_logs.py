from __future__ import annotations

from pathlib import Path

import pytest

from tests.fabricated_fleet import FabricatedFleet
from tidemill.telemetry import run_logs
from tidemill.telemetry.events import DECODE, EVALUATION, read_events
from tidemill.telemetry.report.sections import fleet_data
from tidemill.telemetry.run_data import RunData


def test_figures_and_pages_of_a_long_log_are_those_of_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FabricatedFleet(tmp_path).make()
    short = RunData.load(run)
    monkeypatch.setattr(run_logs, "KEPT_EVENTS", 20)
    long = RunData.load(run)
    events = read_events(run.events)
    assert list(short.events) == list(long.events) == events and long.events[-1] == events[-1]
    assert len(long.events) == len(events) > 20 and len(long.events._kept) == 0
    assert long.summary == short.summary and short.summary["reserved_only_usd"]
    assert long.sessions == short.sessions
    for name in (DECODE, EVALUATION):
        assert long.events_named(name) == [event for event in events if event["event"] == name]


def test_the_timeline_of_a_long_run_has_its_newest_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FabricatedFleet(tmp_path).make()
    (whole,) = fleet_data(RunData.load(run), whole=True)["fleets"]
    monkeypatch.setattr(run_logs, "KEPT_EVENTS", 20)
    monkeypatch.setattr(run_logs, "RECENT_BYTES", 20_000)
    data = RunData.load(run)
    (newest,) = fleet_data(data)["fleets"]
    assert data.events.recent == read_events(run.events)[-len(data.events.recent) :]
    assert newest["workFrom"] and not whole["workFrom"]
    assert newest["marks"] == whole["marks"] and newest["rows"] == whole["rows"]
    assert 0 < len(newest["bars"]) < len(whole["bars"])
    assert all(bar in whole["bars"] for bar in newest["bars"])
    assert fleet_data(data, whole=True)["fleets"] == [whole]
