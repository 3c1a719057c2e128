"""What a report shows, read from a run directory that may be empty, incomplete or still growing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tidemill.core.errors import UserError
from tidemill.core.formatting import compact, counted, decimal, dollars, duration, percent
from tidemill.core.records import Record
from tidemill.telemetry.events import DECODE, JOIN, PLAN, SESSION_END, SESSION_START, read_events
from tidemill.telemetry.fleet_figures import amount, evictions_sentence
from tidemill.telemetry.jsonl import readable_lines
from tidemill.telemetry.manifest import Forecast, read_forecast
from tidemill.telemetry.metrics import MetricLine, read_metrics
from tidemill.telemetry.report.timeline import Timeline
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import Sample, read_samples
from tidemill.telemetry.summary import Evaluation, build_summary, evaluations

WINDOW_STEPS = 3


class SampleWindow(Record):
    """Training samples of a few steps next to each other."""

    steps: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()


class RunData(Record):
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


def read_run(run: RunDirectory) -> RunData:
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
    return RunData(
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
            raise UserError("not one line can be read", where=str(log), hint="restore the file from a copy")
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


class CostBar(Record):
    """A bar of two parts, in per cent of the longest one."""

    label: str
    remark: str
    reserved: float
    preemptible: float
    figure: str


def fleet_section(story: RunData, found: Timeline) -> dict[str, Any]:
    """What the template is given."""
    return {
        "sentence": evictions_sentence(story.summary) or "No machine was taken away",
        "tiles": fleet_tiles(story, found),
        "costs": cost_bars(story.summary),
    }


def fleet_tiles(story: RunData, found: Timeline) -> list[tuple[str, str, str]]:
    """(label, figure, remark)."""
    summary = story.summary
    decoded = [event for event in story.events if event["event"] == DECODE]
    tokens = sum(amount(event, "tokens") for event in decoded)
    remote = sum(amount(event, "tokens") for event in decoded if event.get("kind") == "preemptible")
    starts = [
        amount(event, "duration_s") for event in story.events if event["event"] == JOIN and not event.get("error")
    ]
    goodput, alone = summary["goodput_tokens_per_s"], summary["reserved_only_usd"]
    kept, lost = compact(summary["tokens_kept"]), compact(summary["tokens_lost"])
    rows = [
        ("Workers", f"{mean_serving(found):.1f}", f"on average, most {max(count for _, count in found.serving)}"),
        ("Leases", str(summary["leases"]), f"up in {duration(median(starts))} (median)" if starts else "none came up"),
        ("Evictions", str(summary["evictions"]), f"{summary['evictions_noticed']} with notice"),
        ("Samples moved", str(summary["migrations"]), f"{kept} tokens kept, {lost} lost"),
        ("Generated by them", percent(remote / tokens) if tokens else "-", f"of {compact(tokens)} tokens"),
        ("Goodput", decimal(goodput), "trained tokens per second of wall time"),
    ]
    if summary["cost_usd"]:
        remark = f"{dollars(alone)} on reserved machines only" if alone else "of all machines"
        rows.append(("Cost", dollars(summary["cost_usd"]), remark))
    if summary["crashes"]:
        rows.append(("Crashed", counted(summary["crashes"], "worker"), "they raised errors; see the events"))
    if summary["quarantined"]:
        rows.append(("Quarantined", counted(summary["quarantined"], "worker"), "their logprobs differed"))
    return rows


def mean_serving(found: Timeline) -> float:
    """Preemptible workers that were up, mean over the time the run was worked on."""
    ends = [at_s for at_s, _ in found.serving[1:]] + [found.end_s]
    busy = sum(count * (end_s - at_s) for (at_s, count), end_s in zip(found.serving, ends, strict=True))
    return busy / found.end_s if found.end_s else 0.0


def cost_bars(summary: dict[str, Any]) -> list[CostBar]:
    """This run beside the same on reserved machines only; nothing where nothing has a price."""
    by_kind, alone = summary["cost_by_kind_usd"], summary["reserved_only_usd"]
    if not summary["cost_usd"]:
        return []
    longest = max(summary["cost_usd"], alone or 0.0)
    parts = f"reserved {dollars(by_kind['reserved'])}, preemptible {dollars(by_kind['preemptible'])}"
    shares = {kind: 100 * usd / longest for kind, usd in by_kind.items()}
    bars = [CostBar(label="this run", remark=parts, **shares, figure=dollars(summary["cost_usd"]))]
    if alone:
        bars.append(
            CostBar(
                label="reserved only",
                remark="the same tokens at the speed its own stretches showed",
                reserved=100 * alone / longest,
                preemptible=0.0,
                figure=dollars(alone),
            )
        )
    return bars
