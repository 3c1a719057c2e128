from __future__ import annotations

import math

import pytest

from benchmarks.market_statistics import statistics
from tidemill.pool.traces import CapacityTrace, Stay, stays

# 4 machines for 10 s, 1 for 20 s, 3 for 10 s, 2 for 10 s
TRACE = CapacityTrace.of([(0.0, 4), (10.0, 4), (10.0, 1), (30.0, 1), (30.0, 3), (40.0, 2), (50.0, 2)])


def test_measurements_become_steps() -> None:
    assert TRACE.steps == ((0.0, 4), (10.0, 1), (30.0, 3), (40.0, 2))
    assert (TRACE.start_s, TRACE.end_s, TRACE.peak) == (0.0, 50.0, 4)


def test_the_last_of_simultaneous_counts_holds() -> None:
    assert CapacityTrace.of([(0.0, 1), (5.0, 3), (5.0, 2)]).steps == ((0.0, 1), (5.0, 2))
    assert CapacityTrace.of([(0.0, 1), (5.0, 3), (5.0, 1)]).steps == ((0.0, 1),)  # there and back is no change


def test_the_count_at_a_time() -> None:
    assert [TRACE.count_at(at) for at in (-1, 0, 9.9, 10, 29, 30, 40, 1e9)] == [4, 4, 4, 1, 1, 3, 2, 2]


def test_changes() -> None:
    assert list(TRACE.changes()) == [(10.0, -3), (30.0, 2), (40.0, -1)]


def test_since_a_time() -> None:
    assert TRACE.since(20.0) == CapacityTrace(steps=((0.0, 1), (10.0, 3), (20.0, 2)), end_s=30.0)
    assert TRACE.since(99.0) == CapacityTrace(steps=((0.0, 2),), end_s=0.0)


def test_statistics_by_hand() -> None:
    found = statistics(TRACE)

    assert TRACE.machine_seconds() == 4 * 10 + 1 * 20 + 3 * 10 + 2 * 10 == 110
    assert (found.duration_s, found.mean, found.peak) == (50.0, 110 / 50, 4)
    assert (found.evictions, found.joins) == (4, 2)
    assert (found.bursts, found.arrivals) == ((3, 1), (2,))
    assert found.mean_time_to_eviction_s == 110 / 4
    assert found.mean_time_to_return_s == (4 * 50 - 110) / 2


def test_statistics_of_a_trace_without_evictions() -> None:
    found = statistics(CapacityTrace.of([(0.0, 2)]))
    assert (found.mean, found.evictions, found.mean_time_to_eviction_s) == (2.0, 0, math.inf)


def test_a_new_machine_takes_the_lowest_free_place() -> None:
    trace = CapacityTrace.of([(0.0, 2), (5.0, 0), (6.0, 1), (7.0, 3)])
    assert stays(trace, seed=0) == [
        Stay(place=0, start_s=0.0, end_s=5.0),
        Stay(place=1, start_s=0.0, end_s=5.0),
        Stay(place=0, start_s=6.0, end_s=math.inf),
        Stay(place=1, start_s=7.0, end_s=math.inf),
        Stay(place=2, start_s=7.0, end_s=math.inf),
    ]


def test_evicted_machines_are_drawn_uniformly() -> None:
    trace = CapacityTrace.of([(0.0, 4), (5.0, 3)])
    victims = [stays(trace, seed=seed)[0].place for seed in range(400)]
    assert victims == [stays(trace, seed=seed)[0].place for seed in range(400)]
    assert [victims.count(place) / 400 for place in range(4)] == pytest.approx([0.25] * 4, abs=0.07)
