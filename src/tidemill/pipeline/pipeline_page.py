"""A pipeline's report.html: results and figures of the stages, and links to their reports."""

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
    "finished": "All selected stages are finished.",
    "interrupted": "The pipeline was interrupted; the same command resumes it.",
    "failed": "A stage failed; the same command resumes the pipeline.",
    "running": "The pipeline is running or was killed; the same command resumes it.",
}
DOTS = {
    "done": "finished",
    "running": "running",
    "interrupted": "interrupted",
    "failed": "failed",
    "started": "interrupted",
}
SHARES = ("greedy_accuracy", "pairwise_accuracy")
"""Figures between 0 and 1; the first one that a stage has is shown as a bar."""
INTERVAL = "_interval"
"""Suffix of the figure that contains the 95 % interval of another."""
HIDDEN = ("model", "weights_digest")


def write_page(folder: PipelineFolder) -> Path:
    """Write report.html from pipeline.json and summary.json.

    Raises:
        UserError: it cannot be written.
    """
    write_atomically(folder.report, render_page(TEMPLATE, **context(folder)).encode())
    return folder.report


def context(folder: PipelineFolder) -> dict[str, Any]:
    """The variables of the template."""
    state, summary = folder.read_state(), read_json(folder.summary)
    summaries = {stage["name"]: stage for stage in summary.get("stages", [])}
    stages = [_stage(folder, stage, summaries.get(stage["name"], {})) for stage in state.get("stages", [])]
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


def _stage(folder: PipelineFolder, stage: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    figures = summary.get("figures") or {}
    report = folder.path / stage["folder"] / "report.html"
    return {
        **stage,
        "dot": DOTS.get(stage["state"], "unknown"),
        "headline": summary.get("headline", ""),
        "took": duration(summary["wall_s"]) if "wall_s" in summary else "",
        "figures": [
            (name.replace("_", " "), figure(name, value), _interval(figures.get(f"{name}{INTERVAL}")))
            for name, value in figures.items()
            if value is not None and name not in HIDDEN and not name.endswith(INTERVAL)
        ],
        "bar": _bar(figures),
        "report": os.path.relpath(report, folder.path) if report.is_file() else "",
    }


def figure(name: str, value: Any) -> str:
    """A figure's value as text."""
    if name.endswith("bytes"):
        return gigabytes(value)
    if name.endswith("_s"):
        return duration(value)
    if isinstance(value, int):
        return compact(value)
    return decimal(value) if isinstance(value, float) else str(value)


def _interval(ends: list[float] | None) -> str:
    return between(*ends) if ends else ""


def _bar(figures: dict[str, Any]) -> dict[str, Any] | None:
    """The bar of a stage: its main share with the 95 % interval."""
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
