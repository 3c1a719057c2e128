"""Capacity traces: the number of machines of a market over time; file formats."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from tidemill.core.errors import UserError
from tidemill.core.records import Record


class CapacityTrace(Record):
    """A step function of machine counts. Create it with `of`, which normalises measurements."""

    steps: tuple[tuple[float, int], ...]  # (seconds, machines from then on); times rise, successive counts differ
    end_s: float  # end of the measurement; the last count holds afterwards

    @classmethod
    def of(cls, points: Iterable[tuple[float, int]], *, end_s: float | None = None) -> CapacityTrace:
        """From (seconds, count) pairs in order of time, at least one; the last of simultaneous pairs counts.

        `end_s` is the end of the measurement, by default the time of the last pair.
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
        """Machines at `time_s`; before the first step, its count."""
        return self.steps[max(0, bisect_right(self.steps, (time_s, math.inf)) - 1)][1]

    def changes(self) -> Iterator[tuple[float, int]]:
        """(seconds, difference) of each change."""
        return ((time_s, count - before) for (_, before), (time_s, count) in pairwise(self.steps))

    def since(self, time_s: float) -> CapacityTrace:
        """The trace after `time_s`, which becomes second 0."""
        later = [(at_s - time_s, count) for at_s, count in self.steps if at_s > time_s]
        return CapacityTrace.of([(0.0, self.count_at(time_s)), *later], end_s=max(0.0, self.end_s - time_s))

    def faster(self, speed: float) -> CapacityTrace:
        """The trace with `speed` of its seconds in one."""
        return CapacityTrace.of(((at_s / speed, count) for at_s, count in self.steps), end_s=self.end_s / speed)

    def at_most(self, count: int) -> CapacityTrace:
        """The trace with counts capped at `count`."""
        return CapacityTrace.of(((at_s, min(machines, count)) for at_s, machines in self.steps), end_s=self.end_s)

    def machine_seconds(self) -> float:
        """Machine-seconds from `start_s` to `end_s`."""
        ends = [time_s for time_s, _ in self.steps[1:]] + [self.end_s]
        return sum(count * (end_s - time_s) for (time_s, count), end_s in zip(self.steps, ends, strict=True))


class Stay(Record):
    """One machine's time in the market: [start_s, end_s); `end_s` is infinite if it never goes down."""

    place: int
    start_s: float
    end_s: float


def stays(trace: CapacityTrace, *, seed: int) -> list[Stay]:
    """A history of single machines consistent with `trace`; evicted machines are drawn uniformly.

    A new machine takes the lowest free place. Sorted by end; machines that never go down come last.
    """
    rng, found = random.Random(seed), list[Stay]()
    since_s = dict.fromkeys(range(trace.steps[0][1]), trace.start_s)  # by occupied place
    free: list[int] = []
    for time_s, difference in trace.changes():
        for place in sorted(rng.sample(sorted(since_s), max(0, -difference))):
            found.append(Stay(place=place, start_s=since_s.pop(place), end_s=time_s))
            insort(free, place)
        for _ in range(difference):
            since_s[free.pop(0) if free else len(since_s)] = time_s
    return found + [Stay(place=place, start_s=at_s, end_s=math.inf) for place, at_s in sorted(since_s.items())]


HEADING = ["seconds", "count"]
CSV_SHAPE = "lines look like `1800,12`: seconds, machines from then on"
JSON_SHAPE = 'the file looks like {"metadata": {"gap_seconds": 300}, "data": [12, 12, 7]}'


def read_trace(path: Path) -> CapacityTrace:
    """Read a trace file, CSV or JSON.

    Raises:
        UserError: the file cannot be read or is not a trace; names file and line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        what = f"cannot read the capacity trace: {error.strerror or error}"
        raise UserError(what, where=str(path), hint="check pool.path") from error
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8 text", where=str(path), hint=CSV_SHAPE + "; " + JSON_SHAPE) from error
    return parse_trace(text, source=str(path))


def parse_trace(text: str, *, source: str) -> CapacityTrace:
    """Parse a trace; text that starts with a bracket is JSON.

    Raises:
        UserError: the text is not a trace; names `source` and the line.
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
            what = f"time decreases from {points[-1][0]:g} to {seconds:g}"
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
        raise UserError(
            f"{text} is a negative time", where=where, hint="times are seconds since the start of the trace"
        )
    return seconds


def _count(text: str, where: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise UserError(f"{text!r} is not a whole number of machines", where=where, hint=CSV_SHAPE) from None
    if count < 0:
        raise UserError(f"negative count {count}", where=where, hint="a count is 0 or more")
    return count


def _from_json(text: str, source: str) -> CapacityTrace:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{source}:{error.lineno}"
        raise UserError(f"invalid JSON: {error.msg} at column {error.colno}", where=where, hint=JSON_SHAPE) from error
    metadata = tree.get("metadata") if isinstance(tree, dict) else None
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap_s, int | float) and gap_s < 0:
        what = f"{gap_s:g} is a negative gap"
        raise UserError(what, where=f"{source}: metadata.gap_seconds", hint=JSON_SHAPE)
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not 0 < gap_s < 1e9:
        raise UserError("no metadata.gap_seconds above 0", where=source, hint=JSON_SHAPE)
    if not isinstance(data := tree.get("data"), list):
        raise UserError("no list `data`", where=source, hint=JSON_SHAPE)
    if not data:
        raise UserError("`data` is empty", where=source, hint=JSON_SHAPE)
    for at, count in enumerate(data):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            what = f"{json.dumps(count)} is not a number of machines"
            raise UserError(what, where=f"{source}: data[{at}]", hint="each is 0, 1, 2, ...")
    return CapacityTrace.of(
        ((at * float(gap_s), count) for at, count in enumerate(data)), end_s=len(data) * float(gap_s)
    )
