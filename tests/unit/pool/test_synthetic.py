from __future__ import annotations

import itertools
import math
from statistics import fmean, median

import pytest

from benchmarks.market_statistics import statistics, synthetic_trace
from tests.lease_story import whole_story
from tidemill.config.pool import SyntheticPool
from tidemill.pool.provider import Change
from tidemill.pool.synthetic import (
    Market,
    market_of_pool,
    market_timetable,
)

STEADY = Market(
    machines=8,
    present=8,
    mean_time_to_eviction_s=100.0,
    mean_time_to_return_s=50.0,
    bursts=(1.0, 0.5, 0.25, 0.125),
    arrivals=(1.0, 0.5),
)


def first(market: Market, number: int, *, seed: int = 0) -> list[Change]:
    return list(itertools.islice(market_timetable(market, seed=seed), number))


def lives(changes: list[Change], start: str, end: str) -> list[float]:
    """Seconds from each change to `start` until the same place's next change to `end`."""
    since: dict[int, float] = {}
    found = []
    for change in changes:
        if change.to == start:
            since[change.place] = change.time_s
        elif change.to == end and change.place in since:
            found.append(change.time_s - since.pop(change.place))
    return found


def test_a_pool_becomes_a_market() -> None:
    pool = SyntheticPool(kind="synthetic", workers=3, burst=0.5, notice_s=2.0, noticed=0.4)
    assert market_of_pool(pool) == Market(
        machines=3,
        present=3,
        mean_time_to_eviction_s=20.0,
        mean_time_to_return_s=5.0,
        bursts=(1.0, 0.5, 0.25),
        notice_s=2.0,
        noticed=0.4,
    )
    assert market_of_pool(SyntheticPool(kind="synthetic", workers=2, burst=0.0)).bursts == (1.0, 0.0)


def test_the_seed_determines_the_market() -> None:
    assert first(STEADY, 500, seed=3) == first(STEADY, 500, seed=3)
    assert first(STEADY, 500, seed=3) != first(STEADY, 500, seed=4)


def test_times_to_eviction_and_return_are_exponential() -> None:
    changes = first(STEADY, 40_000)
    for found, mean_s in ((lives(changes, "up", "down"), 100.0), (lives(changes, "down", "up"), 50.0)):
        assert len(found) > 15_000
        assert fmean(found) == pytest.approx(mean_s, rel=0.04)
        assert median(found) == pytest.approx(mean_s * math.log(2), rel=0.05)


def test_the_mean_number_of_machines() -> None:
    trace = synthetic_trace(STEADY, seed=0, duration_s=200_000.0)
    assert statistics(trace).mean == pytest.approx(8 * 100 / (100 + 50), rel=0.03)
    assert trace.peak == 8


def test_burst_sizes() -> None:
    # Where there are plenty of machines, so that no burst is cut short.
    market = Market(
        machines=100, present=100, mean_time_to_eviction_s=1e4, mean_time_to_return_s=1.0, bursts=(1.0, 0.5, 0.25)
    )
    sizes = statistics(synthetic_trace(market, seed=1, duration_s=1e6)).bursts
    assert len(sizes) > 4000
    # P(1) = 1 - 0.5, P(2) = 0.5 - 0.25, P(3) = 0.25
    assert [sizes.count(size) / len(sizes) for size in (1, 2, 3)] == pytest.approx([0.5, 0.25, 0.25], abs=0.03)
    assert max(sizes) == 3


def test_a_market_without_bursts_takes_one_at_a_time() -> None:
    market = Market(machines=4, present=4, mean_time_to_eviction_s=20.0, mean_time_to_return_s=5.0)
    assert set(statistics(synthetic_trace(market, seed=1, duration_s=1e4)).bursts) == {1}


def test_the_share_of_evictions_with_notice() -> None:
    market = market_of_pool(SyntheticPool(kind="synthetic", workers=6, notice_s=3.0, noticed=0.3, seed=5))
    changes = first(market, 20_000, seed=5)
    ends = sum(change.to == "down" for change in changes)
    warnings = [change for change in changes if change.to == "noticed"]
    assert len(warnings) / ends == pytest.approx(0.3, abs=0.02)
    assert all(change.deadline_s == change.time_s + 3.0 for change in warnings)
    assert all(life == pytest.approx(3.0) for life in lives(changes, "noticed", "down"))


def test_no_notice_by_default() -> None:
    for notice_s, noticed in ((0.0, 1.0), (5.0, 0.0)):
        pool = SyntheticPool(kind="synthetic", notice_s=notice_s, noticed=noticed)
        assert not any(change.to == "noticed" for change in first(market_of_pool(pool), 200))


def test_notice_before_every_eviction() -> None:
    pool = SyntheticPool(kind="synthetic", workers=3, notice_s=2.0, noticed=1.0)
    story = whole_story(market_timetable(market_of_pool(pool), seed=0), until_s=300.0)
    assert len(story.ended) > 15
    deadlines = {event.lease_id: event.deadline_s for _, event in story.noticed}
    assert [time_s for time_s, _ in story.ended] == pytest.approx(
        [deadlines[event.lease_id] for _, event in story.ended]
    )


def test_a_market_without_events_ends() -> None:
    market = Market(machines=2, present=2, mean_time_to_eviction_s=math.inf, mean_time_to_return_s=math.inf)
    assert first(market, 10) == [Change(time_s=0.0, place=0, to="up"), Change(time_s=0.0, place=1, to="up")]


def test_a_market_without_returns_dies_out() -> None:
    market = Market(
        machines=2, present=2, mean_time_to_eviction_s=5.0, mean_time_to_return_s=math.inf, notice_s=1.0, noticed=1.0
    )
    assert [change.to for change in first(market, 10)].count("down") == 2


def test_waits_are_relative_to_their_expectation() -> None:
    # One machine: 10 s expected until it goes, 5 s until it is back; the waits are half of that, or one and a half.
    market = Market(machines=1, present=1, mean_time_to_eviction_s=10.0, mean_time_to_return_s=5.0, waits=(0.5, 1.5))
    assert {round(life, 6) for life in lives(first(market, 100), "up", "down")} == {5.0, 15.0}
    assert {round(life, 6) for life in lives(first(market, 100), "down", "up")} == {2.5, 7.5}


def test_a_wait_is_rescaled_when_the_rate_changes() -> None:
    market = Market(
        machines=2,
        present=2,
        mean_time_to_eviction_s=10.0,
        mean_time_to_return_s=math.inf,
        waits=(1.0,),
        notice_s=8.0,
        noticed=1.0,
    )
    # Two machines: one is warned after 10 / 2 s, the other 10 s later; each goes after 8 s.
    assert [(change.time_s, change.to) for change in first(market, 99)[2:]] == [
        (5.0, "noticed"),
        (13.0, "down"),
        (15.0, "noticed"),
        (23.0, "down"),
    ]
