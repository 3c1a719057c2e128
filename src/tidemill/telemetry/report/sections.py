"""The page of a run: a shell with sections. The report shows all of them, `tidemill watch` serves each on demand."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from tidemill.config.load import differences
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, duration, natural_sort_key
from tidemill.telemetry import metrics
from tidemill.telemetry.events import GOLD, TAINTED, WORKER_HEALTH
from tidemill.telemetry.live_state import LiveState
from tidemill.telemetry.report import pages, robot_sections
from tidemill.telemetry.report.charts import chart_data, histograms
from tidemill.telemetry.report.pages import TEMPLATES, render_page
from tidemill.telemetry.report.sample_cards import LEGEND, before_and_after, best_and_worst, report_samples
from tidemill.telemetry.report.sample_pages import samples_section
from tidemill.telemetry.report.timeline import fleet_section, mismatch_rows, run_timeline, timeline_json, worker_rows
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import TWIN_REPORT
from tidemill.telemetry.run_state import LIVELY, RESUMABLE, RunState, StateReader, resume_command
from tidemill.telemetry.sample_index import SampleIndex

SECTIONS = ("overview", "fleet", "learning", "samples", "trust", "setup")
OF_EVALUATIONS = ("overview", "setup")
OF_ROBOTS = ("overview", "episodes", "fleet", "learning", "setup")
OF_TWINS = ("twin", "setup")
ALL_SECTIONS = tuple(dict.fromkeys((*SECTIONS, *OF_ROBOTS, *OF_TWINS)))
FROZEN_VALUES = 50_000
"""In charts of a report, which should stay a small file."""
WORKERS_SHOWN = 5
"""Of the overview."""
RECENT_STEPS = 10
"""Steps whose mean time tells how long the others will take."""


class Shown(NamedTuple):
    """What a section is rendered from."""

    data: RunData
    state: RunState
    live: LiveState | None


def run_page(data: RunData, *, state: RunState | None = None, live: LiveState | None = None, key: str = "") -> str:
    """The page of a run or an evaluation.

    Args:
        state: by default, according to the event log.
        key: of the run in the server's addresses. The page then has the overview and fetches the other sections;
            without a key every section and its data is in the file.
    """
    shown = _shown(data, state, live)
    sections = [
        (name, name.capitalize(), _render(shown, name) if not key or name == _names(data)[0] else "")
        for name in _names(data)
    ]
    return render_page(
        TEMPLATES / "run.html.j2",
        sections=sections,
        key=key,
        chart_data={} if key else chart_data(data, most_values=FROZEN_VALUES) | fleet_data(data, whole=True),
        **_run_line(shown, on_server=bool(key)),
    )


def _names(data: RunData) -> tuple[str, ...]:
    """The sections of a run."""
    if data.is_robot:
        return OF_TWINS if data.manifest.get("kind") == "twin" else OF_ROBOTS
    return OF_EVALUATIONS if data.model_evaluation else SECTIONS


def section(
    data: RunData,
    name: str,
    *,
    state: RunState | None = None,
    live: LiveState | None = None,
    index: SampleIndex | None = None,
) -> str:
    """HTML of the line about the run at the top of the page, and of one of `ALL_SECTIONS`.

    Args:
        index: shows samples as a table of all of them, with filters, not as cards of some.
    """
    shown = _shown(data, state, live)
    html = samples_section(data, index) if index is not None and name == "samples" else _render(shown, name)
    return render_page(TEMPLATES / "run_line.html.j2", **_run_line(shown, on_server=True)) + html


def fleet_data(data: RunData, *, whole: bool = False) -> dict[str, Any]:
    """JSON for fleet.js: at most one timeline; of a long run with the newest work of its workers, or `whole`."""
    work = [*data.events] if whole else data.events.recent
    found = None if data.model_evaluation else run_timeline(data, work=work)
    return {"fleets": [timeline_json(found)] if found else []}


def _render(shown: Shown, name: str) -> str:
    template = TEMPLATES / f"{'sample_cards' if name == 'samples' else name}.html.j2"
    values = VALUES[name](shown) if name in VALUES else {}
    return render_page(template, data=shown.data, live=shown.live, **values)


def _shown(data: RunData, state: RunState | None, live: LiveState | None) -> Shown:
    state = state or logged_state(data)
    return Shown(data, state, live if state.name in LIVELY else None)  # of a run that was killed it is old


def logged_state(data: RunData) -> RunState:
    """The state of a run that nobody watches."""
    if data.model_evaluation:
        return RunState(name="finished", text="An evaluation, without training.")
    if (data.run.path / TWIN_REPORT).is_file():
        return RunState(name="finished", text="A twin, without training.")
    return StateReader(data.run.events, time.monotonic).look(data.events.outline, None, None, usual_step_s=0.0)


def _run_line(shown: Shown, *, on_server: bool) -> dict[str, Any]:
    data, live = shown.data, shown.live
    step, total = (live.step, live.total_steps) if live else (data.summary["steps"], data.summary["total_steps"])
    running = shown.state.name == "running"
    left_s = live.left_s if live else None
    if left_s is None and (times := data.values(metrics.STEP_TIME)[-RECENT_STEPS:]):
        left_s = fmean(times) * (total - step)
    left = duration(left_s) if running and left_s and total > step else ""
    trains = not data.model_evaluation and not (data.run.path / TWIN_REPORT).is_file()
    progress = {"step": step, "total": total, "left": left} if total and trains else None
    command = resume_command(data.run.path) if on_server and shown.state.name in RESUMABLE else ""
    return {"data": data, "state": shown.state, "progress": progress, "command": command}


def _overview(shown: Shown) -> dict[str, Any]:
    data, live = shown.data, shown.live
    evaluated = data.model_evaluation
    workers = Counter(one.worker or "waiting" for one in live.samples) if live else Counter[str]()
    if data.is_robot:
        return {
            "headline": robot_sections.headline(data),
            "held_out": robot_sections.success_bars(data),
            "evaluation": None,
            "tiles": robot_sections.tiles(data),
            "findings": pages.findings(data),
            "made": [],
            "under_way": [],
        }
    return {
        "headline": pages.headline(data),
        "held_out": pages.held_out(data),
        "evaluation": pages.evaluation_section(evaluated) if evaluated else None,
        "tiles": [] if evaluated else pages.tiles(data),
        "findings": pages.findings(data),
        "made": [(name, kind, *row[1:3], *row[4:]) for name, kind, *row in worker_rows(data)[:WORKERS_SHOWN]],
        "under_way": sorted(workers.items(), key=lambda item: natural_sort_key(item[0])),
    }


def _fleet(shown: Shown) -> dict[str, Any]:
    more = shown.live.samples_total - len(shown.live.samples) if shown.live else 0
    fleet = fleet_section(shown.data, run_timeline(shown.data))
    return {"fleet": fleet, "more": f"and {more:,} more" if more > 0 else ""}


def _samples(shown: Shown) -> dict[str, Any]:
    samples = report_samples(shown.data.run)
    windows = ((samples.last, ""), (samples.first, ""), (samples.abandoned, ", taken back"))
    galleries = [
        {"steps": window.title + remark, "best": best, "worst": worst}
        for window, remark in windows
        for best, worst in [best_and_worst(window)]
        if best or worst
    ]
    return {
        "samples": samples,
        "histograms": histograms(samples.first, samples.last),
        "pairs": before_and_after(samples.evaluated_first, samples.evaluated_last),
        "galleries": galleries,
        "legend": LEGEND,
    }


def _trust(shown: Shown) -> dict[str, Any]:
    data = shown.data
    decided = counted(len(data.guard.decisions), "decision") if data.events_named(GOLD) else "no gold scores"
    return {
        "verdict": f"{decided}, {counted(len(data.guard.quarantined), 'machine')} quarantined",
        "decisions": list(pages.guard_findings(data)),
        "mismatches": mismatch_rows(data),
        "health": data.events_named(WORKER_HEALTH),
        "tainted": data.events_named(TAINTED),
    }


def _setup(shown: Shown) -> dict[str, Any]:
    data = shown.data
    try:
        changed = differences(RunSpec(), data.spec)
    except UserError:  # of an older version: config.toml is shown as it is
        changed = []
    return {
        "changed": [(key, _setting(value), _setting(default)) for key, default, value in changed],
        "facts": pages.facts(data),
        "manifest_text": msgspec.json.format(msgspec.json.encode(data.manifest)).decode() if data.manifest else "",
        "events": [] if data.model_evaluation else pages.event_rows(data),
    }


def _setting(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if value == float(f"{value:g}") else repr(value)
    return "-" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()


VALUES: dict[str, Callable[[Shown], dict[str, Any]]] = {
    "overview": _overview, "fleet": _fleet, "samples": _samples, "trust": _trust, "setup": _setup,
    "episodes": lambda shown: robot_sections.episodes(shown.data),
    "twin": lambda shown: robot_sections.twin(shown.data),
}  # fmt: skip
"""Of the templates of sections."""
