"""Whatever the market and whatever is wanted and given back: the leases are accounted for, and never too many."""

from __future__ import annotations

import asyncio
from itertools import pairwise, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.market_statistics import statistics, synthetic_trace
from tests.lease_story import Story, listen, scheduled, whole_story
from tests.virtual_time import run_virtual
from tidemill.core.records import LeaseEnded, LeaseGranted
from tidemill.pool.build_provider import trace_timetable
from tidemill.pool.provider import CLOCK_RESOLUTION_S, BackOff, Timetable
from tidemill.pool.synthetic import Market, market_timetable
from tidemill.pool.traces import CapacityTrace, stays

SEEDS = st.integers(0, 2**32)
TRACES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 6)), min_size=1, max_size=12).map(
    lambda gaps: CapacityTrace.of(
        [(float(sum(gap for gap, _ in gaps[:at])), count) for at, (_, count) in enumerate(gaps)],
        end_s=float(sum(gap for gap, _ in gaps)),
    )
)
MARKETS = st.builds(
    lambda machines, burst, **rest: Market(
        machines=machines, present=machines, bursts=tuple(burst**size for size in range(machines)), **rest
    ),
    machines=st.integers(1, 5),
    burst=st.sampled_from([0.0, 0.3, 0.9]),
    mean_time_to_eviction_s=st.floats(2.0, 50.0),
    mean_time_to_return_s=st.floats(1.0, 50.0),
    notice_s=st.sampled_from([0.0, 1.5, 30.0]),
    noticed=st.sampled_from([0.0, 0.5, 1.0]),
)
# (seconds after the last, then what: a new number wanted, or which of the held leases is given back)
ACTS = st.lists(
    st.tuples(st.floats(0.0, 40.0), st.tuples(st.sampled_from(["want", "release"]), st.integers(0, 7))), max_size=12
)


@given(TRACES, SEEDS)
def test_single_machines_sum_to_the_trace(trace: CapacityTrace, seed: int) -> None:
    found = stays(trace, seed=seed)
    for time_s, count in trace.steps:
        assert sum(stay.start_s <= time_s < stay.end_s for stay in found) == count
    for place in {stay.place for stay in found}:
        own = sorted((stay.start_s, stay.end_s) for stay in found if stay.place == place)
        assert all(end_s <= start_s for (_, end_s), (start_s, _) in pairwise(own))
    assert {stay.place for stay in found} == set(range(trace.peak))


@given(TRACES)
def test_joins_and_evictions_equal_the_changes_of_the_count(trace: CapacityTrace) -> None:
    found = statistics(trace)
    assert trace.steps[0][1] + found.joins - found.evictions == trace.steps[-1][1]
    assert 0 <= found.mean <= found.peak


@given(TRACES, SEEDS, st.sampled_from([0.0, 0.5, 7.0]), st.integers(1, 7))
def test_a_replayed_trace_is_never_exceeded(trace: CapacityTrace, seed: int, notice_s: float, cap: int) -> None:
    timetable = trace_timetable(trace, notice_s=notice_s, seed=seed)
    story, held = whole_story(timetable, until_s=trace.end_s + 1.0, most=cap), 0
    for at, (time_s, event) in enumerate(story.told):
        held += isinstance(event, LeaseGranted) - isinstance(event, LeaseEnded)
        last_of_its_time = at + 1 == len(story.told) or story.told[at + 1][0] > time_s + 1e-5
        if last_of_its_time:
            limit = min(cap, trace.count_at(time_s + 1e-4))
            assert held <= limit
            if not notice_s:
                assert held == limit


@given(TRACES, SEEDS, st.sampled_from([0.5, 7.0]))
def test_a_notice_precedes_its_end_by_exactly_its_length(trace: CapacityTrace, seed: int, notice_s: float) -> None:
    story = whole_story(trace_timetable(trace, notice_s=notice_s, seed=seed), until_s=trace.end_s + 1.0)
    noticed = {event.lease_id: time_s for time_s, event in story.noticed}
    deadlines = {event.lease_id: event.deadline_s for _, event in story.noticed}
    assert len(noticed) == len(story.noticed)
    assert {event.lease_id for _, event in story.ended} <= set(noticed)
    for time_s, event in story.ended:
        assert time_s == pytest.approx(deadlines[event.lease_id], abs=1e-5)
        assert time_s - noticed[event.lease_id] == pytest.approx(notice_s, abs=1e-5)


@given(MARKETS, SEEDS)
def test_a_synthetic_market_stays_within_its_machines_and_keeps_its_notices(market: Market, seed: int) -> None:
    trace = synthetic_trace(market, seed=seed, duration_s=300.0)
    assert trace.peak <= market.machines
    assert all(count >= 0 for _, count in trace.steps)
    story = whole_story(market_timetable(market, seed=seed), until_s=300.0)
    noticed = {event.lease_id: (time_s, event.deadline_s) for time_s, event in story.noticed}
    for time_s, event in story.ended:
        assert (event.lease_id in noticed) == ("after notice" in event.cause)
        if event.lease_id in noticed:
            told_s, deadline_s = noticed[event.lease_id]
            assert deadline_s - told_s == pytest.approx(market.notice_s, abs=1e-5)
            assert time_s == pytest.approx(deadline_s, abs=1e-5)
    still_noticed = set(noticed) - {event.lease_id for _, event in story.ended}
    assert still_noticed <= set(story.held)


async def act(timetable: Timetable, acts: list[tuple[float, tuple[str, int]]]) -> tuple[Story, list[str]]:
    """Play `acts` while listening; returns the story and the leases given back."""
    provider, story = scheduled(timetable, back_off=BackOff(first_s=1.0, longest_s=4.0)), Story()
    loop, wanted, given_back = asyncio.get_running_loop(), 99, list[str]()
    for gap_s, (kind, number) in acts:
        before = len(story.held)
        await listen(provider, story, loop.time() + gap_s)
        assert len(story.held) <= max(wanted, before)
        if kind == "want":
            wanted = number
            provider.request_workers(wanted)
        elif story.held:
            given_back.append(sorted(story.held)[number % len(story.held)])
            del story.held[given_back[-1]]
            await provider.release(given_back[-1])
    await listen(provider, story, loop.time() + 50.0)
    return story, given_back


@given(st.one_of(TRACES, MARKETS), SEEDS, ACTS)
def test_every_lease_ends_once_or_is_still_held(
    kind: CapacityTrace | Market, seed: int, acts: list[tuple[float, tuple[str, int]]]
) -> None:
    def timetable() -> Timetable:
        if isinstance(kind, Market):
            return market_timetable(kind, seed=seed)
        return trace_timetable(kind, notice_s=2.0, seed=seed)

    # A story asserts of itself that no worker has two leases, and that nothing is told of a lease that has ended.
    story, given_back = run_virtual(act(timetable(), acts))
    granted = [event.lease.lease_id for _, event in story.told if isinstance(event, LeaseGranted)]
    assert len(granted) == len(set(granted))
    assert sorted(granted) == sorted([*(event.lease_id for _, event in story.ended), *given_back, *story.held])
    # Every lease is of a machine that is there: of a place that is up when it is granted.
    up = set[str]()
    changes = iter([*takewhile(lambda change: change.time_s < 1000.0, timetable()), None])
    change = next(changes)
    for time_s, event in story.told:
        while change is not None and change.time_s <= time_s + CLOCK_RESOLUTION_S:
            (up.add if change.to == "up" else up.discard)(f"spot-{change.place}")
            change = next(changes)
        if isinstance(event, LeaseGranted):
            assert event.lease.worker_id in up
    assert run_virtual(act(timetable(), acts)) == (story, given_back)  # same seed, same acts, same story
