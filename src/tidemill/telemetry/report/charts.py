"""The plotted data of the report: curves of metrics over steps, and histograms of samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from tidemill.core.formatting import compact
from tidemill.core.records import Record
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
    Chart,
    held_out_prefix,
)
from tidemill.telemetry.report.sample_cards import SampleWindow
from tidemill.telemetry.run_data import RunData

OTHER_CHARTS = 12
"""Most charts of metrics that are not in the registry."""
SIGNIFICANT_DIGITS = 6
AFTER_REWARD = 3
"""Position of the chart of single rewards."""


def chart_data(data: RunData) -> dict[str, Any]:
    """JSON for report.js: the steps, and every chart that has at least one value."""
    by_step = {line.step: dict(line.values) for line in data.metrics}
    evaluated = {HELD_OUT_NAME: data.evaluations, **data.eval_sets}
    for name, found in evaluated.items():
        for evaluation in found:
            row = by_step.setdefault(evaluation.step, {})
            row[_of_set(HELD_OUT_REWARD, name)] = evaluation.reward_mean
            if evaluation.greedy_accuracy is not None:
                row[_of_set(GREEDY_ACCURACY, name)] = evaluation.greedy_accuracy
    if data.forecast is not None:
        for step, row in by_step.items():
            if step > 0:
                expected = data.forecast.of_step(step)
                row |= {FORECAST_STEP: expected.mean, FORECAST_HALF: (expected.high - expected.low) / 2}
    judged = data.guard.by_step
    steps = sorted(by_step.keys() | judged.keys())
    rows = [by_step.get(step, {}) for step in steps]
    charted = {name for chart in CHARTS for name in chart.series}
    unknown = sorted({name for row in rows for name in row} - METRICS.keys() - charted - {FORECAST_HALF})
    held_out = {name for name in unknown if name.removeprefix(HELD_OUT) in charted}
    rewards = {name: name.removeprefix(COMPONENT) for name in unknown if name.startswith(COMPONENT)}
    lags = sorted((name for name in unknown if name.startswith(LAG)), key=lambda name: (len(name), name))
    of_evaluations = tuple(f"{HELD_OUT}{name}" for name in (PASS_AT, *(f"{each}/" for each in data.eval_sets)))
    drawn = (COMPONENT, LAG, MISMATCH_OF, MISMATCH_TOKENS_OF, *of_evaluations)
    others = [name for name in unknown if not name.startswith(drawn) and name not in held_out]
    charts = [_with_more_series(chart, held_out, data.eval_sets) for chart in CHARTS]
    charts.insert(AFTER_REWARD, Chart("Single rewards", "mean of each", rewards, low=None))
    charts[AFTER_REWARD:AFTER_REWARD] = [_pass_at_chart(name, unknown) for name in evaluated]
    if lags not in ([], [f"{LAG}0"]):
        series = {name: name.removeprefix(LAG) for name in lags}
        charts.append(Chart("Tokens by lag", "% of tokens", series, kind="stacked", scale=100))
    engines = [name for name in unknown if name.startswith(MISMATCH_OF) and name.count("/") == 1]
    if len(engines) > 1:
        series = {name: name.removeprefix(MISMATCH_OF) for name in engines}
        charts.append(Chart("Mismatch by engine", "KL, nats per token", series))
    charts += [Chart(name, "", {name: name}, low=None) for name in others[:OTHER_CHARTS]]
    plotted = [_plot(chart, rows) for chart in charts]
    if quality := _plot(QUALITY, [judged.get(step, {}) for step in steps]):
        plotted.insert(0, quality | {"marks": data.guard.marks})
    resumed = {event["step"] for event in data.events_named(RESUME) if isinstance(event.get("step"), int)}
    return {
        "steps": steps,
        "resumed": sorted(resumed),
        "charts": [chart for chart in plotted if chart],
    }


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
    return Chart(title, "drawn samples of held-out prompts", series, kind="points", high=1)


def _plot(chart: Chart, rows: list[dict[str, float]]) -> dict[str, Any] | None:
    """The values of the chart; None if it is omitted."""
    series: list[dict[str, Any]] = [
        {"label": label, "values": [_scaled(row.get(name), chart.scale) for row in rows]}
        | ({"points": True} if chart.kind == "line" and name.startswith(HELD_OUT) else {})  # not of every step
        for name, label in chart.series.items()
        if any(name in row for row in rows)
    ]
    if chart.kind == "stacked":
        series = [one for one in series if any(one["values"])]
    if chart.only_with and not any(chart.only_with in row for row in rows):
        return None
    if not series or (chart.only_if_any and not any(value for one in series for value in one["values"])):
        return None
    band = [_scaled(row.get(chart.band), chart.scale) for row in rows] if chart.band else []
    return {
        "title": chart.title,
        "note": chart.note,
        "kind": chart.kind,
        "low": chart.low,
        "high": chart.high,
        "series": series,
        "band": band if any(value is not None for value in band) else [],
    }


def _scaled(value: float | None, scale: float) -> float | None:
    """Rounded to keep the page small; None for values JSON cannot represent."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value * scale:.{SIGNIFICANT_DIGITS}g}")


BINS = 24
CATEGORIES = 12
LOGPROB_FLOOR = -8.0
TICKS = 8


class Bins(Record):
    """Share of the values in each bin, of the first and the last steps; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    values: tuple[float, ...] = ()  # the value of each bin, if each value has its own


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


def make_bins(first: Sequence[float], last: Sequence[float], span: tuple[float, float] | None = None) -> Bins:
    """Common bins of both windows: one per value if there are few values, otherwise of equal width (over `span`)."""
    edges, values = bin_edges(sorted({value for value in (*first, *last) if math.isfinite(value)}), span)
    return Bins(edges=tuple(edges), first=_shares(first, edges), last=_shares(last, edges), values=values)


def bin_edges(
    distinct: Sequence[float], span: tuple[float, float] | None = None
) -> tuple[list[float], tuple[float, ...]]:
    """Edges of the bins of some values (distinct and ascending), and the value of each bin if each has its own."""
    low, high = (distinct[0], distinct[-1]) if distinct else (0.0, 0.0)
    whole = all(value == int(value) for value in distinct)
    discrete = span is None and (high - low < BINS if whole else len(distinct) <= CATEGORIES)
    low, high, whole = (*span, False) if span else (low, high, whole)
    if discrete and whole:
        distinct = [low + index for index in range(int(high - low) + 1)]
    if discrete:
        middles = [(one + other) / 2 for one, other in pairwise(distinct)]
        return [low - 0.5, *middles, high + 0.5], tuple(distinct)
    width = math.ceil((high - low + 1) / BINS) if whole else (high - low) / BINS
    return [low + index * width for index in range(BINS + 1)], ()


def _shares(values: Sequence[float], edges: Sequence[float]) -> tuple[float, ...]:
    counts = [0] * (len(edges) - 1)
    finite = [value for value in values if math.isfinite(value)]
    for value in finite:
        counts[max(1, min(bisect_right(edges, value), len(counts))) - 1] += 1
    return tuple(count / len(finite) if finite else 0.0 for count in counts)


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
