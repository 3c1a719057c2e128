"""A capacity trace as a timetable: replays when machines came and went, faster if wanted."""

from __future__ import annotations

import math

from tidemill.pool.capacity import CapacityTrace, stays
from tidemill.pool.timetable import Change, Timetable

SPARE = 100
"""Machines told apart beyond those that are taken: those taken are then hit as often as in the trace, or nearly."""

ORDER = {"down": 0, "up": 1, "warned": 2}  # at one time, so that there are never more machines than the trace has


def trace_timetable(
    trace: CapacityTrace,
    *,
    start_s: float = 0.0,
    speed: float = 1.0,
    notice_s: float = 0.0,
    seed: int = 0,
    most: int | None = None,
) -> Timetable:
    """Plays `trace` from `start_s` on, `speed` seconds of it a second.

    Of more machines than `most`, whose player takes no more at once, only so many are told apart that one which goes
    finds another in its place.

    A machine is warned `notice_s` seconds (of the player's time) before the count falls, so that the capacity is the
    trace's at every moment. One that would have to be warned before it is there is warned as it comes, and so not
    leased. At the end of the trace its last count stays.
    """
    changes = []
    rest = trace.since(start_s)
    for stay in stays(rest if most is None else rest.at_most(most + SPARE), seed=seed):
        begin_s, end_s = stay.start_s / speed, stay.end_s / speed
        changes.append(Change(time_s=begin_s, place=stay.place, to="up"))
        if end_s == math.inf:
            continue
        if notice_s:
            changes.append(
                Change(time_s=max(begin_s, end_s - notice_s), place=stay.place, to="warned", deadline_s=end_s)
            )
        changes.append(Change(time_s=end_s, place=stay.place, to="down"))
    return iter(sorted(changes, key=lambda change: (change.time_s, ORDER[change.to], change.place)))
