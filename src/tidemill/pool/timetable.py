"""What a market of machines does over time, place by place: what providers play and traces are drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from tidemill.core.records import Record
from tidemill.pool.capacity import CapacityTrace


class Change(Record):
    """Something happens to one place of the market: a machine comes, is condemned, or goes."""

    time_s: float  # since the timetable's beginning
    place: int  # from 0; a machine that comes back takes a place that was free
    to: Literal["up", "warned", "down"]
    deadline_s: float = 0.0  # of a warned one: when it will be down


Timetable: TypeAlias = Iterator[Change]
"""Changes in the order of time, possibly without end. It never depends on who takes the machines: equal seeds make
equal markets, whatever is done with them."""


def capacity_of(timetable: Timetable, duration_s: float) -> CapacityTrace:
    """How many machines there are, in the first `duration_s` seconds of a timetable."""
    count, points = 0, [(0.0, 0)]
    for change in timetable:
        if change.time_s > duration_s:
            break
        count += {"up": 1, "warned": 0, "down": -1}[change.to]
        points.append((change.time_s, count))
    return CapacityTrace.of(points, end_s=duration_s)
