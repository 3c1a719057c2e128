"""Draws `docs/pictures/schedules.svg`: slots over time with three schedules, for the same prompts.

    python -m benchmarks.schedule_picture

Groups of one sample, so that a bar is a group. Training takes no time.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.line_charts import COLOURS, PICTURES, STYLE

SLOTS, BATCH, OVERSAMPLE, BATCHES = 6, 8, 1.5, 4
SEED = 33
MEAN, LONGEST = 3.0, 16.0
DISCARDED = "#dfe6e9"


@dataclass(frozen=True, slots=True)
class Bar:
    """A sample on a slot; without a batch its tokens are discarded."""

    slot: int
    start: float
    end: float
    batch: int | None


@dataclass(frozen=True, slots=True)
class Drawn:
    title: str
    bars: list[Bar]
    publishes: list[float]


def lengths() -> list[float]:
    source = random.Random(SEED)
    return [min(LONGEST, 0.6 + source.expovariate(1 / MEAN)) for _ in range(BATCH * BATCHES)]


def scheduled(durations: list[float], at: float) -> Iterator[tuple[int, float, float]]:
    """(slot, start, end) of samples that start in order, each on the first free slot from `at` on."""
    free = [(at, slot) for slot in range(SLOTS)]
    for duration in durations:
        start, slot = heapq.heappop(free)
        heapq.heappush(free, (start + duration, slot))
        yield slot, start, start + duration


def waiting(durations: list[float]) -> Drawn:
    """Every batch ends with its longest sample."""
    bars, publishes, now = list[Bar](), list[float](), 0.0
    for batch in range(BATCHES):
        placed = [Bar(*each, batch) for each in scheduled(durations[batch * BATCH : (batch + 1) * BATCH], now)]
        bars += placed
        now = max(bar.end for bar in placed)
        publishes.append(now)
    return Drawn('tail = "wait", lag 0: slots wait for the longest sample', bars, publishes)


def tail_batching(durations: list[float]) -> Drawn:
    """Short rounds start more than a batch; the others wait for a long round."""
    bars, publishes, now = list[Bar](), list[float](), 0.0
    fresh, extra, long = list(durations), list[float](), list[float]()
    for batch in range(BATCHES):
        is_long = len(long) >= BATCH or len(extra) + len(fresh) < BATCH
        most = BATCH if is_long else math.ceil(OVERSAMPLE * BATCH)
        begun = ((long if is_long else []) + extra + fresh)[:most]
        used = max(0, most - len(extra) - (len(long) if is_long else 0))
        fresh, extra, long = fresh[used:], [], [] if is_long else long
        placed = list(scheduled(begun, now))
        ended = sorted(range(len(placed)), key=lambda at: placed[at][2])[:BATCH]
        now = max(placed[at][2] for at in ended)
        for at, (slot, start, end) in enumerate(placed):
            if at in ended:
                bars.append(Bar(slot, start, end, batch))
                continue
            (long if at < BATCH else extra).append(begun[at])
            if start < now:
                bars.append(Bar(slot, start, now, None))
        publishes.append(now)
    return Drawn('tail = "batching", lag 0: extra groups fill the slots, long ones share a round', bars, publishes)


def ahead(durations: list[float]) -> Drawn:
    """Lag 1: samples of the next batch start while the last ones of this batch are generated."""
    bars, publishes, now = list[Bar](), list[float](), 0.0
    free = [(0.0, slot) for slot in range(SLOTS)]
    for batch in range(BATCHES):
        earliest = publishes[batch - 2] if batch > 1 else 0.0
        placed = list[Bar]()
        for duration in durations[batch * BATCH : (batch + 1) * BATCH]:
            at, slot = heapq.heappop(free)
            start = max(at, earliest)
            heapq.heappush(free, (start + duration, slot))
            placed.append(Bar(slot, start, start + duration, batch))
        bars += placed
        now = max(now, *(bar.end for bar in placed))
        publishes.append(now)
    return Drawn("max_policy_lag = 1: the next batch starts meanwhile, under older weights", bars, publishes)


def draw(ax: Axes, drawn: Drawn) -> None:
    for bar in drawn.bars:
        colour = DISCARDED if bar.batch is None else COLOURS[bar.batch]
        hatch = "////" if bar.batch is None else None
        span = [(bar.start, bar.end - bar.start)]
        ax.broken_barh(span, (bar.slot + 0.1, 0.8), facecolor=colour, edgecolor="white", hatch=hatch, linewidth=0.8)
    for at in drawn.publishes:
        ax.axvline(at, color="#16252d", linestyle=":", linewidth=1)
    ax.set(title=drawn.title, yticks=[], ylabel="slots", ylim=(SLOTS, 0))
    ax.grid(visible=False)


def main() -> None:
    durations = lengths()
    panels = [waiting(durations), tail_batching(durations), ahead(durations)]
    with mpl.rc_context({**STYLE, "hatch.color": "#9aa8ae", "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(8.0, 6.0), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True)
        for ax, drawn in zip(axes, panels, strict=True):
            draw(ax, drawn)
        axes[-1].set(xlabel="time", xticks=[], xlim=(0, max(drawn.publishes[-1] for drawn in panels) * 1.01))
        handles: list[Artist] = [Patch(facecolor=COLOURS[at], label=f"batch {at + 1}") for at in range(BATCHES)]
        handles.append(Patch(facecolor=DISCARDED, hatch="////", label="discarded, generated again later"))
        handles.append(Line2D([], [], color="#16252d", linestyle=":", label="new weights"))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        path = PICTURES / "schedules.svg"
        figure.savefig(path, format="svg", metadata={"Date": None})
    print(f"written: {path}")


if __name__ == "__main__":
    main()
