"""The workers there are, as a table of the live view."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.core.records import FleetRow
from tidemill.telemetry.numerals import compact, duration, natural

ROWS = 12
QUIET = "bright_black"
STATE_STYLES = {"starting": QUIET, "loading": "cyan", "serving": "green", "leaving": "yellow"}
COLUMNS: dict[str, Callable[[FleetRow], str]] = {
    "worker": lambda row: row.worker_id,
    "kind": lambda row: row.kind,
    "state": lambda row: row.state,
    "version": lambda row: "-" if row.version is None else str(row.version),
    "running": lambda row: str(row.running),
    "queued": lambda row: str(row.queued),
    "tok/s": lambda row: compact(row.tokens_per_s),
    "$/h": lambda row: f"{row.price_usd_per_hour:.2f}" if row.price_usd_per_hour else "-",
    "age": lambda row: duration(row.age_s),
}
WORDS = ("worker", "kind", "state")
NEEDED_WIDTH = {"version": 48, "queued": 48, "kind": 72, "$/h": 72, "age": 72}  # below it the column is left out


def shown(rows: Sequence[FleetRow]) -> list[FleetRow]:
    """The reserved side and the busiest others, by name: an order that does not move about."""

    def load(row: FleetRow) -> tuple[bool, int, float]:
        return row.kind == "reserved", row.running + row.queued, row.tokens_per_s

    busiest = sorted(rows, key=load, reverse=True)[:ROWS]
    return sorted(busiest, key=lambda row: (row.kind != "reserved", natural(row.worker_id)))


def fleet_table(rows: Sequence[FleetRow], width: int) -> RenderableType:
    """At most `ROWS` workers and a line about the others; narrow terminals get fewer columns."""
    columns = [name for name in COLUMNS if width >= NEEDED_WIDTH.get(name, 0)]
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style=QUIET)
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=True, overflow="ellipsis")
    there = shown(rows)
    for row in there:
        table.add_row(
            *(Text(COLUMNS[name](row), style=STATE_STYLES[row.state] if name == "state" else "") for name in columns)
        )
    if len(rows) == len(there):
        return table
    others = sum(row.tokens_per_s for row in rows) - sum(row.tokens_per_s for row in there)
    more = f"... and {len(rows) - len(there)} more, {compact(max(0.0, others))} tok/s together"
    return Group(table, Text(more, style=QUIET))
