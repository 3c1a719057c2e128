"""A pipeline's report.html: what each stage achieved, the key figures, and links to the stages' own reports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tidemill.core.formatting import between, compact, decimal, duration, gigabytes
from tidemill.pipeline.state import PipelineFolder
from tidemill.telemetry.jsonl import write_atomically
from tidemill.telemetry.report.pages import render_page
from tidemill.telemetry.run_dir import read_json
from tidemill.telemetry.statistics import wilson_interval

TEMPLATE = Path(__file__).parent / "templates" / "pipeline.html.j2"
ENDINGS = {
    "finished": "Every stage that was asked for is finished.",
    "interrupted": "The pipeline was interrupted; the same command goes on with it.",
    "failed": "A stage ended with an error; the same command goes on from there.",
    "running": "The pipeline is in progress, or was killed; the same command goes on with it.",
}
DOTS = {
    "done": "finished",
    "running": "running",
    "interrupted": "interrupted",
    "failed": "failed",
    "begun": "interrupted",
}
SHARES = ("greedy_accuracy", "pairwise_accuracy")
"""Figures between 0 and 1 that are drawn as bars, the first one a stage has."""
INTERVAL = "_interval"
"""Ends the name of the two ends of a figure's 95 % interval, which are shown below it."""
HIDDEN = ("model", "weights_digest")


def write_page(folder: PipelineFolder) -> Path:
    """Write report.html from pipeline.json and summary.json as they are now.

    Raises:
        UserError: it cannot be written.
    """
    write_atomically(folder.report, render_page(TEMPLATE, **context(folder)).encode())
    return folder.report


def context(folder: PipelineFolder) -> dict[str, Any]:
    """What the template is given."""
    state, summary = folder.read_state(), read_json(folder.summary)
    told = {stage["name"]: stage for stage in summary.get("stages", [])}
    stages = [_stage(folder, stage, told.get(stage["name"], {})) for stage in state.get("stages", [])]
    done = sum(stage["state"] == "done" for stage in stages)
    outcome = state.get("outcome", "running")
    return {
        "name": state.get("name", folder.path.name),
        "headline": f"{done} of {len(stages)} stages finished",
        "outcome": outcome,
        "ending": ENDINGS.get(outcome, ENDINGS["running"]),
        "stages": stages,
        "bars": [stage for stage in stages if stage["bar"]],
        "took": duration(summary.get("wall_s", 0.0)),
        "stale": state.get("stale", []),
        "config_text": folder.config.read_text(encoding="utf-8", errors="replace") if folder.config.is_file() else "",
    }


def _stage(folder: PipelineFolder, stage: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    figures = told.get("figures") or {}
    report = folder.path / stage["folder"] / "report.html"
    return {
        **stage,
        "dot": DOTS.get(stage["state"], "unknown"),
        "headline": told.get("headline", ""),
        "took": duration(told["wall_s"]) if "wall_s" in told else "",
        "figures": [
            (name.replace("_", " "), figure(name, value), _interval(figures.get(f"{name}{INTERVAL}")))
            for name, value in figures.items()
            if _shown(name, value)
        ],
        "bar": _bar(figures),
        "report": os.path.relpath(report, folder.path) if report.is_file() else "",
    }


def figure(name: str, value: Any) -> str:
    """A figure as people read it."""
    if name.endswith("bytes"):
        return gigabytes(value)
    if name.endswith("_s"):
        return duration(value)
    if isinstance(value, int):
        return compact(value)
    return decimal(value) if isinstance(value, float) else str(value)


def _shown(name: str, value: Any) -> bool:
    return value is not None and name not in HIDDEN and not name.endswith(INTERVAL)


def _interval(ends: list[float] | None) -> str:
    return between(*ends) if ends else ""


def _bar(figures: dict[str, Any]) -> dict[str, Any] | None:
    """The share that tells most of a stage, with its 95 % interval."""
    for name in SHARES:
        share, n = figures.get(name), figures.get("n")
        if isinstance(share, (int, float)) and 0 <= share <= 1:
            low, high = wilson_interval(share, n) if isinstance(n, int) and n else (share, share)
            return {
                "name": name.replace("_", " "),
                "value": decimal(float(share)),
                "share": 100 * share,
                "low": 100 * low,
                "high": 100 * high,
                "interval": f"{low:.2f}-{high:.2f}, n = {n}" if n else "",
            }
    return None
