"""The fleet on the terminal: a table of workers, and lines for what happens to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.core.formatting import compact, counted, decimal, duration, natural
from tidemill.core.protocols import Clock
from tidemill.core.records import FleetRow
from tidemill.telemetry.events import (
    CRASH,
    DECODE,
    EVICTION,
    HAND_BACK,
    JOIN,
    JOIN_FAILED,
    LEASE,
    LEASE_END,
    MIGRATION,
    NOTICE,
    PULL,
    QUARANTINE,
    REBALANCE,
    VACATED,
)

FLEET_EVENTS = frozenset(
    {
        LEASE,
        JOIN,
        PULL,
        DECODE,
        NOTICE,
        HAND_BACK,
        EVICTION,
        CRASH,
        MIGRATION,
        LEASE_END,
        REBALANCE,
        VACATED,
        QUARANTINE,
        JOIN_FAILED,
    }
)
LINES, WINDOW_S = 8, 10.0
NOUNS = {
    JOIN: "join",
    NOTICE: "notice",
    HAND_BACK: "hand-back",
    EVICTION: "eviction",
    CRASH: "failed worker",
    PULL: "damaged pull",
    JOIN_FAILED: "failed join",
}


def fleet_words(name: str, fields: dict[str, Any]) -> str:
    """One of the fleet's events as a line; empty where it is not worth one."""
    worker, cause = fields.get("worker"), f" ({fields['cause']})" if fields.get("cause") else ""
    if name == JOIN and "error" not in fields:
        return f"{worker} joined after {duration(fields.get('duration_s', 0.0))}"
    if name == NOTICE:
        return f"{worker} will be taken in {duration(fields.get('grace_s', 0.0))}{cause}"
    if name == HAND_BACK:
        return f"asked {worker} to hand back {counted(fields.get('samples', 0), 'sample')}"
    if name == EVICTION:
        if fields.get("noticed"):  # which said why
            return f"evicted {worker} after notice: {_moved(fields)}"
        return f"evicted {worker} without notice: {_moved(fields)}{cause}"
    if name == CRASH:
        return f"{worker} failed: {_moved(fields)}{cause}"
    if name == JOIN_FAILED:
        return f"{worker} did not come up{cause}"
    if name == PULL and (retries := fields.get("retries")):
        return f"{worker} pulled version {fields.get('version')} again: {counted(retries, 'damaged transfer')}"
    if name == QUARANTINE:
        difference, limit = decimal(fields.get("difference")), decimal(fields.get("limit"))
        return f"quarantined {worker}: its logprobs differ from the trainer's by {difference} (limit {limit})"
    return ""


def _moved(fields: dict[str, Any]) -> str:
    samples, kept, lost = (fields.get(key, 0) for key in ("samples", "tokens_kept", "tokens_lost"))
    if not samples:
        return "nothing was running there"
    verb = "goes" if samples == 1 else "go"
    words = f"{counted(samples, 'sample')} {verb} on elsewhere with {counted(kept, 'token')} kept"
    return f"{words}, {lost:,} lost" if lost else words


class FleetLines:
    """Turns events into lines for people. At most `LINES` in `WINDOW_S`; what came beyond is told together after it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reserved: set[str] = set()
        self._window_began_s = -math.inf
        self._told = 0
        self._held: Counter[str] = Counter()
        self._held_moves: Counter[str] = Counter()

    def event(self, name: str, fields: dict[str, Any]) -> list[str]:
        """The lines to show now."""
        lines = self.due()
        if name == LEASE and fields.get("kind") == "reserved":
            self._reserved.add(str(fields.get("lease")))
        words = "" if str(fields.get("lease")) in self._reserved else fleet_words(name, fields)
        if not words:
            return lines
        if self._clock.now() - self._window_began_s >= WINDOW_S:
            self._window_began_s, self._told = self._clock.now(), 0
        self._told += 1
        if self._told <= LINES or name == QUARANTINE:
            return [*lines, words]
        self._held[name] += 1
        if name in (EVICTION, CRASH):
            self._held_moves.update({key: int(fields.get(key, 0)) for key in ("samples", "tokens_kept", "tokens_lost")})
        return lines

    def due(self, *, closing: bool = False) -> list[str]:
        """One line about what was held back, once its time is over."""
        if not self._held or not (closing or self._clock.now() - self._window_began_s >= WINDOW_S):
            return []
        counts = ", ".join(counted(self._held[name], noun) for name, noun in NOUNS.items() if self._held[name])
        moves = f": {_moved(self._held_moves)}" if self._held_moves["samples"] else ""
        self._held.clear()
        self._held_moves.clear()
        return [f"also {counts}{moves}"]


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
