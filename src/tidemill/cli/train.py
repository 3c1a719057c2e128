"""`tidemill train`: train a model, or resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.cli.arguments import Items
from tidemill.cli.arguments import dry_run as show_dry_run
from tidemill.cli.failure import INTERRUPTED_CODE
from tidemill.cli.result import DryRun, Json, Result
from tidemill.config.load import load_spec
from tidemill.pool.build import remarks


def train(*items: Items, dry_run: DryRun = False, json: Json = False) -> Result:
    """Train a model, or resume a run: an existing run directory goes on where it was.

    Ctrl-C ends the run after a checkpoint, with exit code 130; the same command resumes it.
    """
    spec = load_spec(items, purpose="train")
    if dry_run:
        return show_dry_run(spec, notes=remarks(spec.pool))
    from tidemill.runtime.train import train as run

    summary = run(spec)
    exit_code = INTERRUPTED_CODE if summary.get("interrupted") else 0
    return Result(data=summary, text=summary_text(summary, spec.directory), exit_code=exit_code)


def summary_text(summary: dict[str, Any], directory: Path) -> str:
    """Two or three lines: how far, how good, where to look."""
    steps, total = summary.get("steps", 0), summary.get("total_steps", summary.get("steps", 0))
    word = "interrupted" if summary.get("interrupted") else "finished"
    word = "already finished" if summary.get("already_finished") else word
    lines = [f"{word}: {steps} of {total} steps in {duration(summary.get('wall_s') or 0.0)}"]
    measured = summary.get("eval") or {}
    before, after = (accuracy(measured.get(when)) for when in ("before", "after"))
    if before is not None and after is not None:
        lines.append(f"held-out greedy accuracy {before:.2f} → {after:.2f} (n = {measured.get('n')})")
    if summary.get("interrupted"):
        lines.append("the same command resumes it")
    lines.append(f"curves and samples: {directory / 'report.html'}")
    return "\n".join(lines)


def accuracy(evaluation: Any) -> float | None:
    """The figure of one evaluation in a summary; None if it was not measured."""
    found = evaluation.get("greedy_accuracy") if isinstance(evaluation, dict) else None
    return float(found) if isinstance(found, (int, float)) else None


def duration(seconds: float) -> str:
    """`42 s`, `3 min 12 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
