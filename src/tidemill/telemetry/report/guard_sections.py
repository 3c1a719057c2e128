"""The sections of the report about the guards: reward against quality, and the health of machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tidemill.core.formatting import counted, decimal, natural_sort_key, percent
from tidemill.telemetry.events import action_text, decision_text, health_text, probe_text
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.run_data import RunData

HEALTH_ROWS = 200
"""Newest changes of health that are listed."""


class GuardItem(NamedTuple):
    title: str
    text: str
    remark: str = ""


def guard_section(data: RunData) -> dict[str, Any] | None:
    """Template values; None for a run without events of the reward guard."""
    history, gold = data.guard, data.summary.get("gold")
    if "guard" not in data.summary:
        return None
    sentence = f"gold scores of {counted(gold['measured'], 'sample')}, {gold['missing']} missing" if gold else ""
    return {
        "sentence": sentence + ("; dotted: steps that were taken back" if history.abandoned else ""),
        "plotted": bool(history.gold or history.abandoned),
        "findings": list(_items(data, history.decisions, history.probes)),
    }


def _items(
    data: RunData, decisions: Sequence[Mapping[str, Any]], probes: Sequence[Mapping[str, Any]]
) -> Iterator[GuardItem]:
    for one in decisions:
        what = decision_text(one)
        text = f"{what[0].upper()}{what[1:]}. {one.get('reason', '')}"
        changes = [f"{name} {change}" for name in ("proxy", "gold") if (change := _change(one.get(name)))]
        remark = ", ".join([f"Test: {one.get('test')}", *changes])
        yield GuardItem(f"Step {one.get('step')}: {action_text(one)}", text, f"{remark}.")
    for one in probes:
        what = probe_text(one)
        yield GuardItem(
            "Before the first step",
            f"{what[0].upper()}{what[1:]}.",
            f"{text!r:.120}" if (text := one.get("text")) else "",
        )
    gold = data.summary.get("gold") or {}
    if gold.get("missing") and (share := gold["share"]) is not None and share < 1:
        title = f"{percent(1 - share)} of gold scores are missing"
        yield GuardItem(title, "The guard cannot judge these samples.", f"First: {gold['why_missing']}")


def _change(ends: Any) -> str:
    """`0.310 → 0.640`, of the figure before the onset and at the end."""
    match ends:
        case [int() | float() as before, int() | float() as after]:
            return f"{decimal(finite_number(before))} → {decimal(finite_number(after))}"
    return ""


def machines_section(data: RunData) -> dict[str, Any] | None:
    """Template values: changes of health by machine; None for a run without any."""
    changes = data.guard.health[-HEALTH_ROWS:]
    if not changes:
        return None
    rows = [
        {
            "machine": str(event.get("machine") or event.get("worker") or ""),
            "worker": str(event.get("worker") or ""),
            "time": logged_time(event),
            "state": str(event.get("state") or ""),
            "cause": health_text(event),
        }
        for event in changes
    ]
    count = len(data.summary["machines"]["quarantined"])
    return {
        "sentence": f"{counted(count, 'machine')} quarantined" if count else "none quarantined",
        "rows": sorted(rows, key=lambda row: natural_sort_key(row["machine"])),
    }


def logged_time(event: Mapping[str, Any]) -> str:
    return str(event.get("time", "")).replace("T", " ").removesuffix("Z")
