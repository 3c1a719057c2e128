"""Sections of the page of a robot's run: what its policy achieves, its episodes, and its twin."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from tidemill.core.formatting import compact, counted, decimal, duration
from tidemill.telemetry import metrics
from tidemill.telemetry.events import MACHINE
from tidemill.telemetry.report import pages
from tidemill.telemetry.run_data import RunData, of_robots, went
from tidemill.telemetry.run_dir import PLAYBACK, TWIN_REPORT, read_json

MEANS = {"return": "return_mean", "success": "success", "falls": "falls"}
"""Fields of an evaluation by their label; an environment may have no success."""


def headline(data: RunData) -> str:
    """The result of the run in one sentence, and what its reader must know of the environment."""
    machines = data.events_named(MACHINE)
    remarks = machines[-1].get("remarks", []) if machines else []
    return " ".join([_result(data), *(f"{remark[0].upper()}{remark[1:]}." for remark in remarks)])


def _result(data: RunData) -> str:
    over = counted(data.metrics[-1].step if data.metrics else 0, "iteration")
    if len(found := data.robot_evaluations) == 2:
        before, after = of_robots([*found.values()])
        return f"{after.name.capitalize()} {went(before, after, f'in {over}')}."
    for name, title in ((metrics.RETURN_MEAN, "Mean return in training"), (metrics.LOSS, "Loss")):
        values = data.values(name)
        if len(values) > 1:
            return f"{title} went from {decimal(values[0])} to {decimal(values[-1])} in {over}."
    return "No iteration has been completed yet."


def success_bars(data: RunData) -> dict[str, Any] | None:
    """The panel below the headline: success before and after training; None if it is not known."""
    found = {when: one for when, one in data.robot_evaluations.items() if "success" in one}
    if not found:
        return None
    rows = []
    for when, one in found.items():
        low, high = one["success_interval"]
        share = {"value": one["success"], "low": low, "high": high}
        rows.append(pages.bar_row(when, "training", share, is_share=True) | {"faint": when == "before"})
    newest = [*found.values()][-1]
    falls = ", ".join(f"{when} {decimal(one['falls'])}" for when, one in found.items())
    also = f"Share of episodes that ended as failed: {falls}."
    return {"rows": rows, "of": counted(newest["episodes"], "episode"), "what": "Success", "also": also}


def tiles(data: RunData) -> list[tuple[str, str, str]]:
    """(label, figure, remark)"""
    rows = [row for row in pages.tiles(data) if not row[0].startswith("Tokens")]
    steps = data.setting("robot", "worlds") * data.setting("control", "num_steps_per_env")
    speeds, cpu_s = data.values(metrics.STEPS_PER_CPU_S), data.values(metrics.SIMULATION_CPU)
    if cpu_s:
        remark = f"{compact(speeds[-1])} per CPU second" if speeds else ""
        rows += [
            ("Control steps", compact(steps * len(cpu_s)), remark),
            ("Simulation", duration(sum(cpu_s)), "CPU time of chunks"),
        ]
    if repeated := sum(data.values(metrics.REPEATED_CHUNKS)):
        rows.append(("Chunks repeated", compact(repeated), "their worker was lost"))
    return rows


def episodes(data: RunData) -> dict[str, Any]:
    """The recorded episodes, and means before and after training."""
    playback = read_json(data.run.path / PLAYBACK)
    found = [*data.robot_evaluations.values()]
    means = [
        {label: one[name] for label, name in MEANS.items() if name in one}
        | {f"reward term {name}": value for name, value in one["terms"].items()}
        | one["figures"]
        for one in found
    ]
    names = [name for name in means[-1] if name in means[0]] if means else []
    return {
        "playback": playback,
        "of_environment": bool(data.settings.get("robot", {}).get("environment")),
        "digest": blake2b(msgspec.json.encode(playback), digest_size=6).hexdigest(),
        "most": max((len(play["episodes"]) for play in playback.get("plays", ())), default=0),
        "compared": [(name, *(decimal(each[name]) for each in means)) for name in names if len(means) == 2],
    }


def twin(data: RunData) -> dict[str, Any]:
    """The cells of a twin with their shares and bounds, and how success depends on each parameter."""
    report = read_json(data.run.path / TWIN_REPORT)
    cells = report.get("cells", [])
    return {
        "report": report,
        "cells": [
            (
                cell["name"],
                _share(cell, "success"),
                _share(cell, "falls"),
                decimal(cell["return_mean"]),
                cell["episodes"],
                ("passed" if cell["passed"] else "not passed") if cell["required"] else "not required",
            )
            for cell in cells
        ],
        "curves": [_curve(name, points) for name, points in report.get("sensitivity", {}).items()],
    }


def _share(cell: dict[str, Any], name: str) -> str:
    low, high = cell[f"{name}_interval"]
    return f"{cell[name]:.3f} ({low:.3f} to {high:.3f})"


def _curve(name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares over the values of a parameter, with places as shares of width and height from the upper left corner."""
    low, high = points[0]["value"], points[-1]["value"]
    return {
        "title": "delay, s" if name == "delay_s" else f"{name}, factor",
        "points": [
            {
                "x": (point["value"] - low) / (high - low),
                "label": f"{point['value']:g}",
                **{
                    share: [1 - value for value in (point[share], *point[f"{share}_interval"])]
                    for share in ("success", "falls")
                },
            }
            for point in points
        ],
    }
