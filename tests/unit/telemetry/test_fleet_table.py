from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tidemill.core.records import FleetRow
from tidemill.telemetry.progress_views import fleet_table


def row(name: str, **fields: Any) -> FleetRow:
    defaults = {
        "lease_id": name, "worker_id": name, "kind": "preemptible", "state": "serving", "version": 4, "running": 8,
        "queued": 2, "tokens_per_s": 120.0, "price_usd_per_hour": 0.5, "age_s": 95.0,
    }  # fmt: skip
    return FleetRow(**{**defaults, **fields})


def lines(rows: list[FleetRow], width: int = 96) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(fleet_table(rows, width))
    return [text.rstrip() for text in console.export_text().splitlines()]


def test_a_fleet_row_has_all_columns() -> None:
    starting = row("spot-1", state="starting", version=None, price_usd_per_hour=0.0, running=0, queued=0)
    header, local, first, tenth = lines([row("spot-10"), starting, row("local", kind="reserved", version=5)])
    assert header.split() == ["worker", "kind", "state", "version", "running", "queued", "tok/s", "$/h", "age"]
    assert local.split() == ["local", "reserved", "serving", "5", "8", "2", "120", "0.50", "1:35"]
    assert first.split() == ["spot-1", "preemptible", "starting", "-", "0", "0", "120", "-", "1:35"]
    assert tenth.split()[0] == "spot-10", "after spot-1, whatever the letters say"


def test_of_many_workers_the_busiest_are_shown() -> None:
    rows = [row(f"spot-{at}", running=at, tokens_per_s=10.0 * at) for at in range(1, 50)]
    found = lines([row("local", kind="reserved", running=0, queued=0), *rows])
    assert [text.split()[0] for text in found[1:-1]] == ["local", *(f"spot-{at}" for at in range(39, 50))]
    # 10 × (1 + 2 + ... + 38) = 10 × 38 × 39 / 2
    assert found[-1] == "... and 38 more, 7.41k tok/s together"


@pytest.mark.parametrize("width", [36, 70, 96])
def test_the_fleet_table_fits_any_width(width: int) -> None:
    found = lines([row("local", kind="reserved"), row("spot-3")], width)
    assert max(map(len, found)) <= width and len(found) == 3
    assert ("$/h" in found[0]) is (width == 96) and "tok/s" in found[0]
