"""Capacity traces: how many machines a market had at each time, in files and in statistics."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError
from tidemill.core.records import Record


class CapacityTrace(Record):
    """A step function of counts. Made by `of`, which brings what was measured into this form."""

    steps: tuple[tuple[float, int], ...]  # (seconds, machines from then on); times rise, neighbouring counts differ
    end_s: float  # of what was measured; the last count holds for ever

    @classmethod
    def of(cls, points: Iterable[tuple[float, int]], *, end_s: float | None = None) -> CapacityTrace:
        """From (seconds, count) pairs, at least one, in the order of time; of several at one time the last holds.

        `end_s` is when measuring ended, by default at the last pair.
        """
        steps: list[tuple[float, int]] = []
        last_s = 0.0
        for time_s, count in points:
            last_s = time_s
            if steps and steps[-1][0] == time_s:
                steps.pop()
            if not steps or steps[-1][1] != count:
                steps.append((time_s, count))
        return cls(steps=tuple(steps), end_s=last_s if end_s is None else end_s)

    @property
    def start_s(self) -> float:
        return self.steps[0][0]

    @property
    def peak(self) -> int:
        return max(count for _, count in self.steps)

    def count_at(self, time_s: float) -> int:
        """Machines at `time_s`; before the first step as at it."""
        return self.steps[max(0, bisect_right(self.steps, (time_s, math.inf)) - 1)][1]

    def changes(self, after_s: float = -math.inf, through_s: float = math.inf) -> Iterator[tuple[float, int]]:
        """(seconds, difference) of each change in `after_s` < time <= `through_s`."""
        for (_, before), (time_s, count) in pairwise(self.steps):
            if after_s < time_s <= through_s:
                yield time_s, count - before

    def since(self, time_s: float) -> CapacityTrace:
        """What follows `time_s`, which becomes second 0."""
        later = [(at_s - time_s, count) for at_s, count in self.steps if at_s > time_s]
        return CapacityTrace.of([(0.0, self.count_at(time_s)), *later], end_s=max(0.0, self.end_s - time_s))

    def at_most(self, count: int) -> CapacityTrace:
        """The same with so many machines at most."""
        return CapacityTrace.of(((at_s, min(there, count)) for at_s, there in self.steps), end_s=self.end_s)

    def machine_seconds(self) -> float:
        """The sum of all machines' times from `start_s` to `end_s`."""
        ends = [time_s for time_s, _ in self.steps[1:]] + [self.end_s]
        return sum(count * (end_s - time_s) for (time_s, count), end_s in zip(self.steps, ends, strict=True))


class Stay(Record):
    """One machine's time in the market: [start_s, end_s), for ever when `end_s` is infinite."""

    place: int
    start_s: float
    end_s: float


def stays(trace: CapacityTrace, *, seed: int) -> list[Stay]:
    """One history of single machines that makes `trace`: who goes when the count falls is drawn, each as likely.

    A machine that comes takes the lowest free place. In the order of endings, those that stay last.
    """
    rng, found = random.Random(seed), list[Stay]()
    since_s = dict.fromkeys(range(trace.steps[0][1]), trace.start_s)  # of the places that are taken
    free: list[int] = []
    for time_s, difference in trace.changes():
        for place in sorted(rng.sample(sorted(since_s), max(0, -difference))):
            found.append(Stay(place=place, start_s=since_s.pop(place), end_s=time_s))
            insort(free, place)
        for _ in range(difference):
            since_s[free.pop(0) if free else len(since_s)] = time_s
    return found + [Stay(place=place, start_s=at_s, end_s=math.inf) for place, at_s in sorted(since_s.items())]


class Statistics(Record):
    """What a trace says of its market."""

    duration_s: float
    mean: float  # machines
    peak: int
    evictions: int  # machines that went
    joins: int  # machines that came
    bursts: tuple[int, ...]  # machines that went at one time, in order
    arrivals: tuple[int, ...]  # machines that came at one time, in order
    mean_time_to_eviction_s: float  # machine-seconds per eviction, which needs no guess who went; inf without any
    mean_time_to_return_s: float  # seconds of places below the peak, per machine that came; inf without any
    times_to_eviction_s: tuple[float, ...]  # sorted, of one drawn history; machines never evicted are not among them


def statistics(trace: CapacityTrace, *, seed: int = 0) -> Statistics:
    """`seed` draws the history (see `stays`) that `times_to_eviction_s` is of."""
    differences = [difference for _, difference in trace.changes()]
    bursts = tuple(-difference for difference in differences if difference < 0)
    arrivals = tuple(difference for difference in differences if difference > 0)
    duration_s, present_s = trace.end_s - trace.start_s, trace.machine_seconds()
    away_s = trace.peak * duration_s - present_s
    return Statistics(
        duration_s=duration_s,
        mean=present_s / duration_s if duration_s else float(trace.steps[0][1]),
        peak=trace.peak,
        evictions=sum(bursts),
        joins=sum(arrivals),
        bursts=bursts,
        arrivals=arrivals,
        mean_time_to_eviction_s=present_s / sum(bursts) if bursts else math.inf,
        mean_time_to_return_s=away_s / sum(arrivals) if arrivals else math.inf,
        times_to_eviction_s=tuple(
            sorted(stay.end_s - stay.start_s for stay in stays(trace, seed=seed) if stay.end_s < math.inf)
        ),
    )


HEADING = ["seconds", "count"]
CSV_SHAPE = "a line looks like `1800,12`: seconds and machines from then on; a change may be two lines at one time"
JSON_SHAPE = 'the file looks like {"metadata": {"gap_seconds": 300}, "data": [12, 12, 7]}'


def read_trace(path: Path, read: Callable[[Path], bytes]) -> CapacityTrace:
    """The trace in a file, of either format; `read` returns the file's bytes.

    Raises:
        UserError: naming file and line; it cannot be read, or is no trace.
    """
    try:
        text = read(path).decode("utf-8-sig")
    except OSError as error:
        what = f"cannot read the capacity trace: {error.strerror or error}"
        raise UserError(what, where=str(path), hint="check pool.path") from error
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8 text", where=str(path), hint=CSV_SHAPE + "; " + JSON_SHAPE) from error
    return parse_trace(text, source=str(path))


def parse_trace(text: str, *, source: str) -> CapacityTrace:
    """The trace in a file's text; what begins with a bracket is JSON.

    Raises:
        UserError: naming `source` and the line.
    """
    if not text.strip():
        raise UserError("the file is empty", where=source, hint=CSV_SHAPE + "; " + JSON_SHAPE)
    return _from_json(text, source) if text.lstrip()[0] in "{[" else _from_csv(text, source)


def _from_csv(text: str, source: str) -> CapacityTrace:
    points: list[tuple[float, int]] = []
    heading = False
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where, fields = f"{source}:{number}", [field.strip() for field in line.split(",")]
        if not (points or heading) and [field.lower() for field in fields] == HEADING:
            heading = True
            continue
        if len(fields) != 2:
            raise UserError(f"expected two numbers, found {line.strip()!r}", where=where, hint=CSV_SHAPE)
        seconds, count = _seconds(fields[0], where), _count(fields[1], where)
        if points and seconds < points[-1][0]:
            what = f"time goes back, from {points[-1][0]:g} to {seconds:g}"
            raise UserError(what, where=where, hint="sort the lines by time")
        points.append((seconds, count))
    if not points:
        raise UserError("no lines below the heading", where=source, hint=CSV_SHAPE)
    return CapacityTrace.of(points)


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UserError(f"{text!r} is not a number of seconds", where=where, hint=CSV_SHAPE)
    if seconds < 0:
        raise UserError(f"{text} is a negative time", where=where, hint="count seconds from the trace's beginning, 0")
    return seconds


def _count(text: str, where: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise UserError(f"{text!r} is not a whole number of machines", where=where, hint=CSV_SHAPE) from None
    if count < 0:
        raise UserError(f"{count} machines cannot be", where=where, hint="a count is 0 or more")
    return count


def _from_json(text: str, source: str) -> CapacityTrace:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{source}:{error.lineno}"
        raise UserError(f"broken JSON: {error.msg} at column {error.colno}", where=where, hint=JSON_SHAPE) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"broken JSON: {error}", where=source, hint=JSON_SHAPE) from error
    gap_s, data = _parts(tree, source)
    for at, count in enumerate(data):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            what = f"{json.dumps(count)} is not a number of machines"
            raise UserError(what, where=f"{source}: data[{at}]", hint="each is 0, 1, 2, ...")
    return CapacityTrace.of(((at * gap_s, count) for at, count in enumerate(data)), end_s=len(data) * gap_s)


def _parts(tree: Any, source: str) -> tuple[float, list[Any]]:
    metadata = tree.get("metadata") if isinstance(tree, dict) else None
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap_s, int | float) and gap_s < 0:
        what = f"{gap_s:g} is a negative time between two rows"
        raise UserError(what, where=f"{source}: metadata.gap_seconds", hint=JSON_SHAPE)
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not 0 < gap_s < 1e9:
        raise UserError("no metadata.gap_seconds above 0", where=source, hint=JSON_SHAPE)
    if not isinstance(tree.get("data"), list):
        raise UserError("no list `data`", where=source, hint=JSON_SHAPE)
    if not tree["data"]:
        raise UserError("`data` is empty", where=source, hint=JSON_SHAPE)
    return float(gap_s), tree["data"]
