"""The sections of the report about the guards: reward against quality, and the health of machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidemill.core.formatting import counted, decimal, natural_sort_key, percent
from tidemill.telemetry.events import decision_text, health_text, probe_text
from tidemill.telemetry.guard_history import machine_name
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.run_data import RunData

HEALTH_ROWS = 200
"""Newest changes of health that are listed."""


def guard_section(data: RunData) -> dict[str, Any] | None:
    """Template values; None for a run without events of the reward guard."""
    if "guard" not in data.summary:
        return None
    history, gold = data.guard, data.summary.get("gold")
    notes = [f"{counted(gold['measured'], 'gold score')}, {gold['missing']} missing"] if gold else []
    notes += ["dotted: steps that were taken back"] if history.abandoned else []
    return {
        "sentence": "; ".join(notes),
        "plotted": bool(history.gold or history.abandoned),
        "findings": list(_findings(data)),
    }


def _findings(data: RunData) -> Iterator[tuple[str, str, str]]:
    """(title, text, figures)"""
    for one in data.guard.decisions:
        ends = {name: [decimal(finite_number(end)) for end in one.get(name, ())] for name in ("proxy", "gold")}
        figures = "".join(f", {name} {' → '.join(values)}" for name, values in ends.items() if values)
        text = f"{_sentence(decision_text(one))} {one.get('reason', '')}"
        yield f"Step {one.get('step')}: {one.get('action')}", text, f"Test: {one.get('test')}{figures}."
    for one in data.guard.probes:
        yield "Before the first step", _sentence(probe_text(one)), str(one.get("text") or "")[:120]
    gold = data.summary.get("gold") or {}
    if gold.get("missing"):
        title = f"{percent(1 - gold['share'])} of gold scores are missing"
        yield title, "The guard cannot judge these samples.", f"First: {gold['why_missing']}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def machine_rows(health: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """(machine, worker, time, state, cause) of changes of health, by machine."""
    rows = [
        (machine_name(one), str(one.get("worker") or ""), logged_time(one), str(one.get("state")), health_text(one))
        for one in health[-HEALTH_ROWS:]
    ]
    return sorted(rows, key=lambda row: natural_sort_key(row[0]))


def logged_time(event: Mapping[str, Any]) -> str:
    return str(event.get("time", "")).replace("T", " ").removesuffix("Z")
