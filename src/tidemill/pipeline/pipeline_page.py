"""A pipeline's report.html: results and figures of the stages, and links to their reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.core.formatting import compact, decimal, duration, gigabytes, interval
from tidemill.pipeline.pipeline_result import INTERVAL, SHARES, TITLES, PipelineResult, measured, pipeline_result
from tidemill.pipeline.state import PipelineFolder
from tidemill.telemetry.jsonl import write_atomically
from tidemill.telemetry.report.pages import bar_row, render_page
from tidemill.telemetry.run_dir import read_json

TEMPLATE = Path(__file__).parent / "templates" / "pipeline.html.j2"
ENDINGS = {
    "finished": "All selected stages are finished.",
    "interrupted": "The pipeline was interrupted; the same command resumes it.",
    "failed": "A stage failed; the same command resumes the pipeline.",
    "running": "The pipeline is running or was killed; the same command resumes it.",
}
DOTS = {"done": "finished", "started": "interrupted"}
HIDDEN = ("model", "weights_digest", "seed")
LABELS = {
    "peak_rss_bytes": "peak memory",
    "n": "held-out items",
    "reward_mean": "mean reward",
    "reward_mean_before": "mean reward before",
}


def write_page(folder: PipelineFolder) -> Path:
    """Write report.html from pipeline.json and summary.json. Raises UserError: it cannot be written."""
    with folder.updating():
        write_atomically(folder.report, render_page(TEMPLATE, **context(folder)).encode())
    return folder.report


def context(folder: PipelineFolder) -> dict[str, Any]:
    """The variables of the template."""
    state, summary = folder.read_state(), read_json(folder.summary)
    summaries = {stage["name"]: stage for stage in summary.get("stages", [])}
    stages = [_stage(folder, stage, summaries.get(stage["name"], {})) for stage in state.get("stages", [])]
    done = sum(stage["state"] == "done" for stage in stages)
    result = pipeline_result([{**stage, "figures": stage["values"]} for stage in stages])
    leading = [stage for name in result.shown for stage in stages if stage["name"] == name]
    outcome = state.get("outcome", "running")
    return {
        "name": state.get("name", folder.path.name),
        "headline": result.headline,
        "main": result.main,
        "progress": f"{done} of {len(stages)} stages finished.",
        "outcome": outcome,
        "ending": ENDINGS.get(outcome, ENDINGS["running"]) + (f" {summary['error']}." if "error" in summary else ""),
        "stages": stages,
        "by_importance": [*leading, *(stage for stage in stages if stage not in leading)],
        "figure_title": TITLES.get(result.figure, result.figure),
        "bars": _bars(stages, result),
        "took": duration(summary.get("wall_s", 0.0)),
        "stale": state.get("stale", []),
        "config_text": folder.config.read_text(encoding="utf-8", errors="replace") if folder.config.is_file() else "",
    }


def _stage(folder: PipelineFolder, stage: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    figures = summary.get("figures") or {}
    report = folder.path / stage["folder"] / "report.html"
    return {
        **stage,
        "dot": DOTS.get(stage["state"], stage["state"]),
        "headline": summary.get("headline", ""),
        "took": duration(summary["wall_s"]) if "wall_s" in summary else "",
        "figures": [
            (LABELS.get(name, name.replace("_", " ")), figure(name, value), _remark(figures, name))
            for name, value in figures.items()
            if value is not None and name not in HIDDEN and not name.endswith(INTERVAL)
        ],
        "values": figures,
        "report": os.path.relpath(report, folder.path) if report.is_file() else "",
    }


def figure(name: str, value: Any) -> str:
    """A figure's value as text."""
    if name.endswith("bytes"):
        return gigabytes(value)
    if name.endswith("_s"):
        return duration(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return compact(value)
    return decimal(value) if isinstance(value, float) else str(value)


def _remark(figures: dict[str, Any], name: str) -> str:
    """The interval of a figure that has one."""
    key = f"{name}{INTERVAL}"
    if key not in figures:
        return ""
    return f"95 %: {interval(figures[key])}" if figures[key] else interval(None)


def _bars(stages: Sequence[dict[str, Any]], result: PipelineResult) -> list[dict[str, Any]]:
    """The main share of the result, if it is one, in every stage that measured it; that of a stage that trains also
    before it."""
    name = result.figure
    if name not in SHARES:
        return []
    bars = []
    for stage in stages:
        values, shown = stage["values"], stage["name"] in result.shown
        trained = shown and values.get(f"{name}_before") is not None
        if trained:
            bars.append(_bar("before", stage["name"], values, f"{name}_before"))
        if values.get(name) is not None:
            label, remark = ("after", stage["name"]) if trained else (stage["name"], stage["kind"])
            bars.append(_bar(label, remark, values, name) | {"faint": not shown})
    return bars


def _bar(label: str, remark: str, values: dict[str, Any], key: str) -> dict[str, Any]:
    figure, n = measured(values, key), values.get("n")
    low, high = figure.interval or (None, None)
    bar = bar_row(label, remark, {"value": figure.value, "low": low, "high": high}, is_share=True)
    return bar | {"faint": True, "interval": f"{bar['interval']}, n = {n}" if figure.interval else ""}
