"""Several runs beside each other: curves over a common axis, final figures, paired differences, configurations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.config.keys import flattened
from tidemill.core.errors import UserError
from tidemill.core.formatting import compact, decimal, dollars, duration, interval, natural_sort_key, percent
from tidemill.telemetry.fleet_figures import HOUR_S, held_leases
from tidemill.telemetry.metrics import CHARTS, METRICS, TOKENS_GENERATED, Chart
from tidemill.telemetry.run_data import RunData, comparable, first_and_last
from tidemill.telemetry.sample_files import read_samples
from tidemill.telemetry.statistics import Paired, paired

FEWEST, MOST = 2, 8
AXES = {"step": "step", "tokens": "tokens generated", "seconds": "seconds of work", "dollars": "dollars"}
POINTS = 600
"""Most points of a curve; of more, evenly spaced ones and the last."""
SIGNIFICANT_DIGITS = 6
ABSENT = "–"
EVALUATED = "eval-"
"""Prefix of the purpose of evaluations in names of samples files."""


def check_number(paths: Sequence[Path]) -> None:
    """Raises UserError: too few or too many runs, or one of them twice."""
    if not FEWEST <= len(paths) <= MOST:
        raise UserError(f"{len(paths)} runs", hint=f"name {FEWEST} to {MOST} run directories to compare")
    places = [path.resolve() for path in paths]
    for at, place in enumerate(places):
        if place in places[:at]:
            raise UserError("this run is there twice", where=str(paths[at]), hint="name each run once")


def labels(runs: Sequence[RunData]) -> list[str]:
    """The runs' names; where several have the same, the shortest ends of their paths that differ."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    parts = [run.run.path.resolve().parts for run in runs]
    depths = range(1, max(map(len, parts)) + 1)
    ends = (["/".join(each[-depth:]) for each in parts] for depth in depths)
    return next(distinct for distinct in ends if len(set(distinct)) == len(runs))


def comparison_json(runs: Sequence[RunData]) -> dict[str, Any]:
    """JSON for compare.js: the axes of each run, and for each metric a curve of each run that measured it."""
    names = labels(runs)
    kept = [_kept(len(run.metrics)) for run in runs]
    charts, constant = list[dict[str, Any]](), list[tuple[str, float]]()
    for metric, chart in _charts(runs):
        series = list[dict[str, Any]]()
        for at, (run, rows) in enumerate(zip(runs, kept, strict=True)):
            values = run.metrics.column(metric)[rows] * chart.scale
            series.append({"label": names[at], "run": at, "values": [_rounded(value) for value in values.tolist()]})
        known = {value for curve in series for value in curve["values"]} - {None}
        if len(known) > 1:
            shown = {"title": chart.title, "note": chart.note, "group": chart.group}
            charts.append({"metric": metric, **shown, "series": series})
        else:
            constant += [(chart.title, value) for value in known]
    return {
        "axes": AXES,
        "runs": [
            {"label": name, "axes": {axis: [values[at] for at in rows] for axis, values in axes_of(run).items()}}
            for name, run, rows in zip(names, runs, kept, strict=True)
        ],
        "charts": charts,
        "constant": constant,  # in all runs the same, (title, value)
    }


def _kept(number: int) -> list[int]:
    stride = math.ceil(number / POINTS) or 1
    return sorted({*range(0, number, stride), number - 1} - {-1})


def _charts(runs: Sequence[RunData]) -> list[tuple[str, Chart]]:
    """Every metric of any run, with a chart of its own; those of the registry's charts come first, in their order."""
    measured = {name for run in runs for name in run.metrics.names}
    found = dict[str, Chart]()
    for chart in CHARTS:
        for metric, label in chart.series.items():
            title = chart.title if len(chart.series) == 1 else f"{chart.title}: {label}"
            found.setdefault(metric, chart._replace(title=title))
    for metric in sorted(measured - found.keys(), key=natural_sort_key):
        found[metric] = Chart(metric, METRICS[metric].unit if metric in METRICS else "", {})
    return [(metric, chart) for metric, chart in found.items() if metric in measured]


def _rounded(value: float) -> float | None:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None


def axes_of(run: RunData) -> dict[str, list[float]]:
    """What each line of metrics has cost by then, in `AXES`. Seconds and dollars count all sessions, and also steps
    that were taken back; tokens those of the surviving history. No dollars if the run has no prices."""
    lines = run.metrics
    starts = {number: session.start_s for number, session in run.sessions.items()}
    seconds = np.array([starts.get(line.session, 0.0) + line.elapsed_s for line in lines])
    tokens = np.nancumsum(lines.column(TOKENS_GENERATED))
    spent = seconds * run.setting("fleet", "reserved_usd_per_hour") / HOUR_S
    for lease in held_leases(run.events.outline, run.sessions).values():
        if lease.kind == "preemptible" and lease.cost_usd:
            share = (seconds - lease.start_s) / max(lease.end_s - lease.start_s, 1e-9)
            spent = spent + lease.cost_usd * np.clip(share, 0.0, 1.0)
    found = {"step": [line.step for line in lines], "tokens": tokens.tolist(), "seconds": seconds.round(3).tolist()}
    return found | ({"dollars": spent.round(6).tolist()} if spent.any() else {})


def final_figures(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """(label, a text for each run) of what each run has reached and used. A row that no run has is left out."""
    rows = dict[str, list[str]]()
    for at, run in enumerate(runs):
        for label, text in _figures_of(run).items():
            rows.setdefault(label, [ABSENT] * len(runs))[at] = text
    return list(rows.items())


def _figures_of(run: RunData) -> dict[str, str]:
    summary = run.summary
    steps = f"{summary['steps']} / {summary['total_steps']}" if summary["total_steps"] else str(summary["steps"])
    found = {"State": run.outcome, "Steps": steps}
    for name, evaluations in {"held-out": run.evaluations, **run.eval_sets}.items():
        before, after = first_and_last(evaluations)
        for figure, one in zip(comparable([each for each in (before, after) if each]), (before, after), strict=False):
            when = "before" if one is before and before else "after"
            ends = f" ({interval(figure.interval)})" if figure.interval else ""
            found[f"{name} {figure.name}, {when}"] = f"{decimal(figure.value)}{ends}"
    found |= {"Tokens generated": compact(summary["tokens_generated"]), "Wall time": duration(summary["wall_s"])}
    if summary["cost_usd"]:
        found["Cost"] = dollars(summary["cost_usd"])
    if (idle := summary["trainer_idle_share"]) is not None:
        found["Trainer idle"] = percent(idle)
    if summary["leases"]:
        found["Evictions"] = f"{summary['evictions']} of {summary['leases']} machines"
        found["Tokens lost"] = compact(summary["tokens_lost"])
    return found


def paired_figures(runs: Sequence[RunData]) -> list[tuple[str, int, Paired]]:
    """(set, run, difference) of the last evaluation of each later run from the first run's, on the prompts that both
    have."""
    first, *others = [_last_rewards(run) for run in runs]
    found = []
    for name, of_first in first.items():
        for at, sets in enumerate(others, 1):
            rewards = sets.get(name, {})
            if common := sorted(of_first.keys() & rewards.keys()):
                pair = paired([of_first[each] for each in common], [rewards[each] for each in common])
                found.append((name, at, pair))
    return found


def _last_rewards(run: RunData) -> dict[str, dict[tuple[str, str], float]]:
    """By set: the reward of the greedy completion of each prompt (id, text) in the last evaluation, valid ones only."""
    newest = {purpose: path for _, purpose, path in run.run.sample_files() if purpose.startswith(EVALUATED)}
    found = dict[str, dict[tuple[str, str], float]]()
    for purpose, path in newest.items():
        rewards = found.setdefault(purpose.removeprefix(EVALUATED), {})
        for sample in read_samples(path):
            if sample.valid and sample.reward is not None:
                rewards.setdefault((sample.prompt_id, sample.prompt), sample.reward)
    return found


def changed_keys(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """(key, a text for each run) of the configuration keys that do not have the same value in all runs."""
    settings = [flattened(run.settings) for run in runs]
    keys = sorted({key for each in settings for key in each}, key=natural_sort_key)
    return [
        (key, [f"{each.get(key, ABSENT)!s:.200}" for each in settings])
        for key in keys
        if any(each.get(key) != settings[0].get(key) for each in settings) and key != "run.dir"
    ]
