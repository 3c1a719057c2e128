"""The plotted data of the report: curves of metrics over steps, and histograms of samples."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from hashlib import blake2b
from itertools import pairwise
from math import nan
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.core.formatting import ROUNDING_ERROR, compact
from tidemill.core.records import Record
from tidemill.telemetry.binning import Bins, make_bins
from tidemill.telemetry.events import RESUME
from tidemill.telemetry.guard_history import QUALITY
from tidemill.telemetry.metrics import (
    CHARTS,
    COMPONENT,
    DRAWN_REWARD,
    FORECAST_HALF,
    FORECAST_STEP,
    GREEDY_ACCURACY,
    HELD_OUT,
    HELD_OUT_NAME,
    HELD_OUT_REWARD,
    LAG,
    METRICS,
    MISMATCH_OF,
    MISMATCH_TOKENS_OF,
    PASS_AT,
    RETURN_MEAN,
    ROBOT_FIGURE,
    TERM,
    Chart,
    held_out_prefix,
)
from tidemill.telemetry.report.sample_cards import SampleWindow
from tidemill.telemetry.run_data import RunData

MOST_UNKNOWN = 200
"""Most charts of metrics that are not in the registry."""
MOST_POINTS = 2000
"""Points of a series. Of longer runs, buckets of steps contribute their extremes: no spike is hidden."""
FEWEST_POINTS = 250
LATE_STEPS = 8
"""Steps that are sent again: scores of the guard and evaluations may be logged after their steps."""
MOST_VALUES = 1_000_000
SIGNIFICANT_DIGITS = 5
SAME = 1e-6
"""Relative difference of values that are plotted as one constant, such as by float32 rounding."""
AFTER_REWARD = 3
"""Position of the chart of single rewards."""
OVERVIEW_SHOWN = 6
SHOWN_LAST = ("Step time", "Entropy")
"""Of the overview: they do not say whether a run learns."""
OVERVIEW = (
    QUALITY.title, "Success and falls", "Episode return", "Reward terms", "Held-out accuracy", "Reward", "Held-out reward", "Completion length", "Step time", "Entropy",
    "Loss", "Token accuracy", "Pairwise accuracy",
)  # fmt: skip
"""Charts that say whether a run learns; the overview has the first of them that the run has."""
TRUST = (
    QUALITY.title, "Engine and trainer mismatch", "Mismatch by engine", "Importance ratio", "Effective sample size",
    "Importance correction", "Policy lag", "Tokens by lag",
)  # fmt: skip

Column: TypeAlias = NDArray[np.float64]
"""Values of a metric at each step; NaN where it was not measured."""
Columns = dict[str, Column]


def chart_data(
    data: RunData, *, after: int | None = None, cursor: str = "", most_values: int = MOST_VALUES
) -> dict[str, Any]:
    """JSON for charts.js: the steps, every chart, and the titles of those on other pages.

    Args:
        after: the last step that the reader has; the answer starts at the first point that it lacks or that changed.
        cursor: of the reader's newest answer. If its history or its charts were replaced, it gets all, with `reset`.
        most_values: of all series together; above it they have fewer points than `MOST_POINTS`.
    """
    steps, columns = _columns(data)
    charts, constant = list[Chart](), list[tuple[str, float | None]]()
    for chart in _charts(data, columns):
        series = {name: label for name, label in chart.series.items() if _drawn(chart, columns.get(name))}
        measured = [columns[name][np.isfinite(columns[name])] for name in series]
        values = np.concatenate(measured) if measured else np.empty(0)
        flat = len(values) > 0 and np.ptp(values) <= SAME * np.abs(values).max()
        if flat and (not values.any() or max(map(len, measured)) > 2):
            constant.append((chart.title, _rounded(values[0] * chart.scale)))
        elif len(values):
            charts.append(chart._replace(series=series))
    most = min(MOST_POINTS, max(FEWEST_POINTS, most_values // max(1, sum(len(chart.series) for chart in charts))))
    bucket = 1
    while len(steps) > most and 2 * len(set(steps // bucket)) > most:
        bucket *= 2
    points = _points(steps, steps, bucket) if len(steps) else []
    shape = [(chart.title, *chart.series.values()) for chart in charts]
    whole = after is None or _cursor(data, shape, bucket, after) != cursor
    start = 0 if after is None or whole else bisect_left(points, (after + 1 - LATE_STEPS) // bucket * bucket)
    titles = {chart.title for chart in charts} | {title for title, _ in constant}
    return {
        "steps": points[start:],
        "resumed": sorted({event["step"] for event in data.events_named(RESUME) if isinstance(event.get("step"), int)}),
        "charts": [
            _plot(chart, steps, columns, bucket, start)
            | ({"marks": data.guard.marks} if chart.title == QUALITY.title else {})
            for chart in charts
        ],
        "constant": constant,
        "overview": sorted(
            [title for title in OVERVIEW if title in titles][:OVERVIEW_SHOWN], key=SHOWN_LAST.__contains__
        ),
        "trust": [title for title in TRUST if title in titles],
        "cursor": _cursor(data, shape, bucket, int(steps[-1]) if len(steps) else 0),
        **({} if after is None else {"reset": True} if whole else {"start": start}),
    }


def _drawn(chart: Chart, column: Column | None) -> bool:
    """A part of a stacked chart is only drawn if it is ever more than 0."""
    return column is not None and (chart.kind != "stacked" or bool(np.nan_to_num(column).any()))


def _cursor(data: RunData, shape: Any, bucket: int, step: int) -> str:
    """Of what a reader has that knows these charts up to a step: equal as long as nothing of it is replaced."""
    at = bisect_right(data.metrics, step, key=lambda line: line.step)
    last = data.metrics[at - 1] if at else None
    evaluated = (one for found in (data.evaluations, *data.eval_sets.values()) for one in found)
    settled = step - LATE_STEPS
    late = sum(one.step <= settled for one in evaluated), sum(at <= settled for at in data.guard.by_step)
    known = [shape, bucket, last and (last.step, last.session, last.elapsed_s), late, data.guard.marks]
    return blake2b(msgspec.json.encode(known), digest_size=8).hexdigest()


def _columns(data: RunData) -> tuple[NDArray[np.int64], Columns]:
    """The steps, and the metrics with the figures of evaluations, of the guard and of the forecast."""
    evaluated = {HELD_OUT_NAME: data.evaluations, **data.eval_sets}
    logged = data.metrics.column("step").astype(np.int64)
    others = {one.step for found in evaluated.values() for one in found} | data.guard.by_step.keys()
    steps = np.union1d(logged, np.array([*others], dtype=np.int64))
    columns = Columns()

    def put(name: str, at: Any, values: Any) -> None:
        if not len(at):
            return
        if name not in columns:
            columns[name] = np.full(len(steps), nan)
        columns[name][np.searchsorted(steps, at)] = values

    for name in data.metrics.names:
        put(name, logged, data.metrics.column(name))
    for step, figures in data.guard.by_step.items():
        for name, value in figures.items():
            put(name, [step], value)
    for name, found in evaluated.items():
        put(_of_set(HELD_OUT_REWARD, name), [one.step for one in found], [one.reward_mean for one in found])
        right = {one.step: one.greedy_accuracy for one in found if one.greedy_accuracy is not None}
        put(_of_set(GREEDY_ACCURACY, name), [*right], [*right.values()])
    if data.forecast is not None and len(steps) and steps[-1] > 0:
        later = steps[steps > 0]
        expected = [data.forecast.of_step(int(step)) for step in later]
        put(FORECAST_STEP, later, [one.mean for one in expected])
        put(FORECAST_HALF, later, [(one.high - one.low) / 2 for one in expected])
    return steps, {name: np.where(np.abs(values) < ROUNDING_ERROR, 0.0, values) for name, values in columns.items()}


def _charts(data: RunData, columns: Columns) -> list[Chart]:
    """All charts of a run, in page order; some have no values."""
    charted = {name for chart in (QUALITY, *CHARTS) for name in chart.series}
    unknown = sorted(columns.keys() - METRICS.keys() - charted - {FORECAST_HALF})
    held_out = {name for name in unknown if name.removeprefix(HELD_OUT) in charted}
    rewards = {name: name.removeprefix(COMPONENT) for name in unknown if name.startswith(COMPONENT)}
    lags = sorted((name for name in unknown if name.startswith(LAG)), key=lambda name: (len(name), name))
    of_evaluations = tuple(f"{HELD_OUT}{name}" for name in (PASS_AT, *(f"{each}/" for each in data.eval_sets)))
    terms = {name: name.removeprefix(TERM) for name in unknown if name.startswith(TERM)}
    figures = {name: name.removeprefix(ROBOT_FIGURE) for name in unknown if name.startswith(ROBOT_FIGURE)}
    drawn = (COMPONENT, TERM, ROBOT_FIGURE, LAG, MISMATCH_OF, MISMATCH_TOKENS_OF, *of_evaluations)
    others = [name for name in unknown if not name.startswith(drawn) and name not in held_out]
    charts = [_with_more_series(chart, held_out, data.eval_sets) for chart in CHARTS]
    charts.insert(AFTER_REWARD, Chart("Single rewards", "mean of each", rewards, low=None, group="Reward"))
    charts[AFTER_REWARD:AFTER_REWARD] = [_pass_at_chart(name, unknown) for name in (HELD_OUT_NAME, *data.eval_sets)]
    of_robots = [Chart("Reward terms", "mean of an episode", terms, low=None, group="Episodes")]
    of_robots += [
        Chart(label, "mean of an episode", {name: label}, low=None, group="Episodes") for name, label in figures.items()
    ]
    after_return = next(at for at, chart in enumerate(charts) if RETURN_MEAN in chart.series) + 1
    charts[after_return:after_return] = of_robots
    shares = {name: name.removeprefix(LAG) for name in lags if lags != [f"{LAG}0"]}
    charts.append(Chart("Tokens by lag", "% of tokens", shares, kind="stacked", scale=100, group="Off-policy"))
    engines = [name for name in unknown if name.startswith(MISMATCH_OF) and name.count("/") == 1]
    by_engine = {name: name.removeprefix(MISMATCH_OF) for name in engines if len(engines) > 1}
    charts.append(Chart("Mismatch by engine", "KL, nats per token", by_engine, group="Off-policy"))
    taken = {chart.title for chart in (QUALITY, *charts)}
    named = {f"{name} (metric)" if name in taken else name: name for name in others[:MOST_UNKNOWN]}
    charts += [Chart(title, "", {name: name}, low=None) for title, name in named.items()]
    return [QUALITY._replace(group="Reward"), *charts]


def _of_set(metric: str, name: str) -> str:
    """A metric of the task's held-out prompts for another set."""
    return metric.replace(HELD_OUT, held_out_prefix(name), 1)


def _with_more_series(chart: Chart, held_out: Collection[str], sets: Collection[str]) -> Chart:
    """Adds the held-out variants of the chart's metrics that are in no other chart, and its figures of `eval.sets`."""
    series = dict(chart.series)
    for metric, label in chart.series.items():
        if HELD_OUT + metric in held_out:
            series[HELD_OUT + metric] = f"{label}, held-out"
    for name in sets:
        for metric, label in chart.series.items():
            if metric in (HELD_OUT_REWARD, GREEDY_ACCURACY, DRAWN_REWARD):
                series[_of_set(metric, name)] = f"{name}, {label}" if metric == DRAWN_REWARD else name
    return chart._replace(series=series)


def _pass_at_chart(name: str, metrics: Collection[str]) -> Chart:
    """A curve for each k."""
    prefix = f"{held_out_prefix(name)}{PASS_AT}"
    found = sorted((metric for metric in metrics if metric.startswith(prefix)), key=lambda name: (len(name), name))
    title = "pass@k" if name == HELD_OUT_NAME else f"pass@k, {name}"
    series = {metric: f"pass@{metric.removeprefix(prefix)}" for metric in found}
    return Chart(title, "drawn samples of held-out prompts", series, kind="points", high=1, group="Reward")


def _plot(chart: Chart, steps: NDArray[np.int64], columns: Columns, bucket: int, start: int) -> dict[str, Any]:
    """The chart from its point `start` on."""

    def values(name: str) -> list[float | None]:
        return [_rounded(value) for value in _points(columns[name] * chart.scale, steps, bucket)[start:]]

    series: list[dict[str, Any]] = [
        {"label": chart.series[name], "values": values(name)}
        | ({"points": True} if chart.kind == "line" and name.startswith(HELD_OUT) else {})  # not of every step
        for name in chart.series
    ]
    band = values(chart.band) if chart.band in columns else []
    return {
        "title": chart.title,
        "group": chart.group,
        "note": chart.note + (", forecast ± two deviations" if chart.band == FORECAST_HALF and band else ""),
        "kind": chart.kind,
        "low": chart.low,
        "high": chart.high,
        "series": series,
        "band": band,
    }


def _points(column: NDArray[Any], steps: NDArray[np.int64], bucket: int) -> list[Any]:
    """The values; of buckets of several steps the smallest and the largest, in the order in which they occur."""
    if bucket == 1:
        return list(column.tolist())
    starts = np.flatnonzero(np.diff(steps // bucket, prepend=-1))
    low, high = np.fmin.reduceat(column, starts), np.fmax.reduceat(column, starts)
    sizes = np.diff(starts, append=len(column))
    at = np.arange(len(column))

    def first(extreme: NDArray[Any]) -> NDArray[Any]:
        return np.minimum.reduceat(np.where(column == np.repeat(extreme, sizes), at, len(column)), starts)

    rising = first(low) <= first(high)
    pairs = np.stack([np.where(rising, low, high), np.where(rising, high, low)], axis=1)
    return list(pairs.reshape(-1)[(np.stack([sizes, sizes - 1], axis=1) > 0).reshape(-1)].tolist())


def _rounded(value: float) -> float | None:
    """With few figures, to keep the page small; None for values JSON cannot represent."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None


LOGPROB_FLOOR = -8.0
TICKS = 8


class HistogramBar(Record):
    title: str
    first: float  # height relative to the tallest bar
    last: float


class Histogram(Record):
    title: str
    note: str
    bars: tuple[HistogramBar, ...]
    ticks: tuple[tuple[float, str], ...]  # (position, counted in bars; label)


def histograms(first: SampleWindow, last: SampleWindow) -> list[Histogram]:
    """Completion length, reward and logprob; a histogram without values is omitted."""
    windows = (first.samples, last.samples)
    lengths = [[float(sample.length) for sample in samples] for samples in windows]
    rewards = [[one.reward for one in samples if one.valid and one.reward is not None] for samples in windows]
    logprobs = [
        [max(LOGPROB_FLOOR, value) for sample in samples for value in sample.logprobs if value is not None]
        for samples in windows
    ]
    found = []
    if any(windows):
        found.append(_histogram("Completion length", "tokens", make_bins(lengths[0], lengths[1])))
    if any(rewards):
        found.append(_histogram("Reward", "valid samples", make_bins(rewards[0], rewards[1])))
    if any(logprobs):
        note = f"nats, {LOGPROB_FLOOR:g} and below together"
        found.append(_histogram("Token logprob", note, make_bins(logprobs[0], logprobs[1], span=(LOGPROB_FLOOR, 0.0))))
    return found


def _histogram(title: str, note: str, bins: Bins) -> Histogram:
    top = max((*bins.first, *bins.last), default=0.0) or 1.0
    every = max(1, math.ceil(len(bins.first) / TICKS))
    if bins.values:
        labels = [compact(value) for value in bins.values]
        ticks = [(index + 0.5, label) for index, label in enumerate(labels)]
    else:
        labels = [f"{compact(low)} to {compact(high)}" for low, high in pairwise(bins.edges)]
        ticks = [(float(index), compact(edge)) for index, edge in enumerate(bins.edges)]
    bars = (
        HistogramBar(
            title=f"{label}: first {100 * one:.1f} %, last {100 * other:.1f} %", first=one / top, last=other / top
        )
        for label, one, other in zip(labels, bins.first, bins.last, strict=True)
    )
    return Histogram(title=title, note=note, bars=tuple(bars), ticks=tuple(ticks[::every]))
