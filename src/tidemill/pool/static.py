"""Workers that nobody takes away."""

from __future__ import annotations

from tidemill.pool.timetable import Change, Timetable


def static_timetable(workers: int) -> Timetable:
    """`workers` machines, there from the start and for ever."""
    return (Change(time_s=0.0, place=place, to="up") for place in range(workers))
