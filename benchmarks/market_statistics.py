"""Statistics of capacity traces, and traces of synthetic markets."""

from __future__ import annotations

import math

from tidemill.core.records import Record
from tidemill.pool.provider import Timetable
from tidemill.pool.synthetic import Market, market_timetable
from tidemill.pool.traces import CapacityTrace


def capacity_of(timetable: Timetable, duration_s: float) -> CapacityTrace:
    """The number of machines over the first `duration_s` seconds of a timetable."""
    count, points = 0, [(0.0, 0)]
    for change in timetable:
        if change.time_s > duration_s:
            break
        count += {"up": 1, "noticed": 0, "down": -1}[change.to]
        points.append((change.time_s, count))
    return CapacityTrace.of(points, end_s=duration_s)


def synthetic_trace(market: Market, *, seed: int, duration_s: float) -> CapacityTrace:
    return capacity_of(market_timetable(market, seed=seed), duration_s)


class Statistics(Record):
    """Statistics of a trace."""

    duration_s: float
    mean: float  # machines
    peak: int
    evictions: int  # machines that went down
    joins: int  # machines that came up
    bursts: tuple[int, ...]  # machines per eviction event, in order of time
    arrivals: tuple[int, ...]  # machines per arrival event, in order of time
    mean_time_to_eviction_s: float  # machine-seconds per eviction; inf without any
    mean_time_to_return_s: float  # empty place-seconds below the peak, per arrival; inf without any


def statistics(trace: CapacityTrace) -> Statistics:
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
    )
