"""The plotted data of the report: curves of metrics over steps, and histograms of samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from tidemill.core.formatting import compact
from tidemill.core.records import Record
from tidemill.telemetry.events import RESUME
from tidemill.telemetry.metrics import (
    CHARTS,
    COMPONENT,
    FORECAST_HALF,
    FORECAST_STEP,
    GREEDY_ACCURACY,
    HELD_OUT,
    HELD_OUT_REWARD,
    LAG,
    METRICS,
    Chart,
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
    for evaluation in data.evaluations:
        row = by_step.setdefault(evaluation.step, {})
        row[HELD_OUT_REWARD] = evaluation.reward_mean
        if evaluation.greedy_accuracy is not None:
            row[GREEDY_ACCURACY] = evaluation.greedy_accuracy
    if data.forecast is not None:
        for step, row in by_step.items():
            if step > 0:
                expected = data.forecast.of_step(step)
                row |= {FORECAST_STEP: expected.mean, FORECAST_HALF: (expected.high - expected.low) / 2}
    steps = sorted(by_step)
    rows = [by_step[step] for step in steps]
    charted = {name for chart in CHARTS for name, _ in chart.series}
    unknown = sorted({name for row in rows for name in row} - METRICS.keys() - charted - {FORECAST_HALF})
    held_out = {name for name in unknown if name.removeprefix(HELD_OUT) in charted}
    rewards = tuple((name, name.removeprefix(COMPONENT)) for name in unknown if name.startswith(COMPONENT))
    lags = sorted((name for name in unknown if name.startswith(LAG)), key=lambda name: (len(name), name))
    others = [name for name in unknown if not name.startswith((COMPONENT, LAG)) and name not in held_out]
    charts = [_with_held_out(chart, held_out) for chart in CHARTS]
    charts.insert(AFTER_REWARD, Chart(title="Single rewards", note="mean of each", series=rewards, low=None))
    if lags not in ([], [f"{LAG}0"]):
        series = tuple((name, name.removeprefix(LAG)) for name in lags)
        charts.append(Chart(title="Tokens by lag", note="% of tokens", series=series, kind="stacked", scale=100))
    charts += [Chart(title=name, note="", series=((name, name),), low=None) for name in others[:OTHER_CHARTS]]
    resumed = {event["step"] for event in data.events_named(RESUME) if isinstance(event.get("step"), int)}
    return {
        "steps": steps,
        "resumed": sorted(resumed),
        "charts": [plotted for chart in charts if (plotted := _plot(chart, rows))],
    }


def _with_held_out(chart: Chart, held_out: Collection[str]) -> Chart:
    """Adds the held-out variants of the chart's metrics that have no chart of their own."""
    more = ((f"{HELD_OUT}{name}", f"{label}, held-out") for name, label in chart.series)
    return replace(chart, series=(*chart.series, *(one for one in more if one[0] in held_out)))


def _plot(chart: Chart, rows: list[dict[str, float]]) -> dict[str, Any] | None:
    """The chart's values; None if it is to be omitted."""
    series = [
        {"label": label, "values": [_scaled(row.get(name), chart.scale) for row in rows]}
        for name, label in chart.series
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
WIDTH, HEIGHT, MARGIN = 360.0, 132.0, 20.0


class Bins(Record):
    """Share of the values in each bin, of the first and the last steps; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    values: tuple[float, ...] = ()  # the value of each bin, if each value has its own


class Bar(Record):
    x: float
    width: float
    first_y: float
    first_height: float
    last_y: float
    last_height: float
    title: str


class Tick(Record):
    x: float
    label: str


class Histogram(Record):
    title: str
    note: str
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]


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
        found.append(_layout("Completion length", "tokens", make_bins(lengths[0], lengths[1])))
    if any(rewards):
        found.append(_layout("Reward", "valid samples", make_bins(rewards[0], rewards[1])))
    if any(logprobs):
        note = f"nats, {LOGPROB_FLOOR:g} and below together"
        found.append(_layout("Token logprob", note, make_bins(logprobs[0], logprobs[1], span=(LOGPROB_FLOOR, 0.0))))
    return found


def make_bins(first: Sequence[float], last: Sequence[float], span: tuple[float, float] | None = None) -> Bins:
    """Common bins of both windows: one per value if there are few values, otherwise of equal width (over `span`)."""
    values = [value for value in (*first, *last) if math.isfinite(value)]
    distinct = sorted(set(values))
    low, high = (distinct[0], distinct[-1]) if distinct else (0.0, 0.0)
    whole = all(value == int(value) for value in distinct)
    discrete = span is None and (high - low < BINS if whole else len(distinct) <= CATEGORIES)
    low, high, whole = (*span, False) if span else (low, high, whole)
    if discrete and whole:
        distinct = [low + index for index in range(int(high - low) + 1)]
    if discrete:
        middles = [(one + other) / 2 for one, other in pairwise(distinct)]
        edges = [low - 0.5, *middles, high + 0.5]
    else:
        width = math.ceil((high - low + 1) / BINS) if whole else (high - low) / BINS
        edges = [low + index * width for index in range(BINS + 1)]
    return Bins(
        edges=tuple(edges),
        first=_shares(first, edges),
        last=_shares(last, edges),
        values=tuple(distinct) if discrete else (),
    )


def _shares(values: Sequence[float], edges: Sequence[float]) -> tuple[float, ...]:
    counts = [0] * (len(edges) - 1)
    finite = [value for value in values if math.isfinite(value)]
    for value in finite:
        position = next((index for index in range(1, len(edges)) if value < edges[index]), len(counts))
        counts[position - 1] += 1
    return tuple(count / len(finite) if finite else 0.0 for count in counts)


def _layout(title: str, note: str, bins: Bins) -> Histogram:
    count = len(bins.first)
    slot = WIDTH / count
    floor = HEIGHT - MARGIN
    top = max((*bins.first, *bins.last), default=0.0) or 1.0

    def height(share: float) -> float:
        return round(share / top * (floor - 4), 2)

    bars = []
    for index, (one, other) in enumerate(zip(bins.first, bins.last, strict=True)):
        label = _bin_label(bins, index)
        bars.append(
            Bar(
                x=round(index * slot, 2),
                width=round(slot, 2),
                first_y=round(floor - height(one), 2),
                first_height=height(one),
                last_y=round(floor - height(other), 2),
                last_height=height(other),
                title=f"{label}: first {100 * one:.1f} %, last {100 * other:.1f} %",
            )
        )
    return Histogram(title=title, note=note, bars=tuple(bars), ticks=tuple(_ticks(bins, slot)))


def _bin_label(bins: Bins, index: int) -> str:
    low, high = bins.edges[index], bins.edges[index + 1]
    return compact(bins.values[index]) if bins.values else f"{compact(low)} to {compact(high)}"


def _ticks(bins: Bins, slot: float) -> list[Tick]:
    count = len(bins.first)
    every = max(1, math.ceil(count / 8))
    if bins.values:
        return [
            Tick(x=round((index + 0.5) * slot, 2), label=_bin_label(bins, index)) for index in range(0, count, every)
        ]
    return [Tick(x=round(index * slot, 2), label=compact(bins.edges[index])) for index in range(0, count + 1, every)]
