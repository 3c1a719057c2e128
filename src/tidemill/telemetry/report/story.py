"""Everything a report tells, read from a run directory that may be empty, half-written or still growing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.config.words import counted
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.telemetry.evaluations import Evaluation, evaluations
from tidemill.telemetry.events import PLAN, SESSION_END, SESSION_START, read_events
from tidemill.telemetry.forecast import Forecast, read_forecast
from tidemill.telemetry.jsonl import readable_lines
from tidemill.telemetry.metrics import MetricLine, read_metrics
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.samples import Sample, read_samples
from tidemill.telemetry.summary import build_summary

WINDOW_STEPS = 3


class SampleWindow(Record):
    """Training samples of a few steps next to each other."""

    steps: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()


class Story(Record):
    """What the page is made from."""

    name: str
    outcome: str  # finished, interrupted, failed, running, killed, unknown
    summary: dict[str, Any]
    metrics: tuple[MetricLine, ...]
    evaluations: tuple[Evaluation, ...]
    events: tuple[dict[str, Any], ...]
    manifest: dict[str, Any]
    config_text: str
    groups: int  # per batch; 0 when the configuration does not say
    first: SampleWindow
    last: SampleWindow
    evaluated_first: SampleWindow  # held-out samples of the first and the last evaluation
    evaluated_last: SampleWindow
    forecast: Forecast | None = None  # of when it began
    left_out: tuple[str, ...] = ()  # of the logs, in words
    measured: dict[str, Any] | None = None  # what an evaluation found; None of a training run


def read_story(run: RunDirectory) -> Story:
    """Read it all; whatever is missing or torn is left out."""
    lines, events = read_metrics(run.metrics), read_events(run.events)
    config_text = run.config.read_text(encoding="utf-8", errors="replace") if run.exists else ""
    config = run.read_settings()
    outcome = outcome_of(events)
    told = run.read_summary()
    peak_rss_bytes = int(told.get("peak_rss_bytes") or 0)
    planned = [event["steps"] for event in events if event["event"] == PLAN and isinstance(event.get("steps"), int)]
    summary = build_summary(
        run,
        outcome=outcome,
        total_steps=planned[-1] if planned else _whole(config.get("trainer"), "steps"),
        peak_rss_bytes=peak_rss_bytes,
    )
    files = run.sample_files()
    train = [(step, path) for step, purpose, path in files if purpose == "train"]
    held_out = [(step, path) for step, purpose, path in files if purpose.startswith("eval")]
    window = min(WINDOW_STEPS, max(1, len(train) // 2))
    return Story(
        name=str(summary["run"]),
        left_out=left_out(run),
        outcome=outcome,
        summary=summary,
        groups=_whole(config.get("batch"), "prompts"),
        metrics=tuple(lines),
        evaluations=tuple(evaluations(events, lines)),
        events=tuple(events),
        manifest=run.read_manifest(),
        config_text=config_text,
        forecast=read_forecast(run.path),
        measured=told if "completion_tokens" in told else None,  # a training run tells its own below `eval`
        first=_window(train[:window]),
        last=_window(train[-window:] if len(train) > 1 else []),
        evaluated_first=_window(held_out[:1]),
        evaluated_last=_window(held_out[-1:] if len(held_out) > 1 else []),
    )


def left_out(run: RunDirectory) -> tuple[str, ...]:
    """In words, for each log of which there are lines that cannot be read.

    Raises:
        UserError: there are metrics, and none can be read.
    """
    found = []
    for log in (run.metrics, run.events):
        readable, lines = readable_lines(log)
        if log == run.metrics and lines and not readable:
            raise UserError("not one line can be read", where=str(log), cure="restore the file from a copy")
        if readable < lines:
            found.append(f"{lines - readable} of {counted(lines, 'line')} of {log.name} cannot be read")
    return tuple(found)


def outcome_of(events: Sequence[dict[str, Any]]) -> str:
    """How the newest session ended; without a word about its end, whether its process still lives."""
    sessions = [event for event in events if event["event"] in (SESSION_START, SESSION_END)]
    if not sessions:
        return "unknown"
    newest = sessions[-1]
    if newest["event"] == SESSION_END:
        return str(newest.get("outcome", "unknown"))
    if newest.get("host") != platform.node() or not isinstance(newest.get("pid"), int):
        return "unknown"
    return "running" if _alive(newest["pid"]) else "killed"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _whole(section: Any, key: str) -> int:
    value = section.get(key) if isinstance(section, dict) else None
    return value if isinstance(value, int) else 0


def _window(files: Sequence[tuple[int, Path]]) -> SampleWindow:
    samples = tuple(sample for _, path in files for sample in read_samples(path))
    return SampleWindow(steps=tuple(step for step, _ in files), samples=samples)
