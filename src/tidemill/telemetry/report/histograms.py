"""Histograms of the first steps against the last, as the coordinates of an inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from tidemill.core.records import Record
from tidemill.telemetry.numerals import compact
from tidemill.telemetry.report.story import SampleWindow

BINS = 24
CATEGORIES = 12
LOGPROB_FLOOR = -8.0
WIDTH, HEIGHT, MARGIN = 360.0, 132.0, 20.0


class Bins(Record):
    """Shares of values between neighbouring edges; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    values: tuple[float, ...] = ()  # the value each bin is for, where each value has its own


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
    """Completion length, reward and logprob; those without any value are left out."""
    found = []
    if first.samples or last.samples:
        found.append(_layout("Completion length", "tokens", make_bins(_lengths(first), _lengths(last))))
    early, late = _rewards(first), _rewards(last)
    if early or late:
        found.append(_layout("Reward", "valid samples", make_bins(early, late)))
    early, late = _logprobs(first), _logprobs(last)
    if early or late:
        note = f"nats, {LOGPROB_FLOOR:g} and below together"
        found.append(_layout("Token logprob", note, make_bins(early, late, span=(LOGPROB_FLOOR, 0.0))))
    return found


def _lengths(window: SampleWindow) -> list[float]:
    return [float(sample.length) for sample in window.samples]


def _rewards(window: SampleWindow) -> list[float]:
    return [sample.reward for sample in window.samples if sample.valid and sample.reward is not None]


def _logprobs(window: SampleWindow) -> list[float]:
    return [max(LOGPROB_FLOOR, value) for sample in window.samples for value in sample.logprobs if value is not None]


def make_bins(first: Sequence[float], last: Sequence[float], span: tuple[float, float] | None = None) -> Bins:
    """Common bins for both: one per value when there are few values, equal widths (over `span` if given) otherwise."""
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
