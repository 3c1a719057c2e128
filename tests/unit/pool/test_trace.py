from __future__ import annotations

from benchmarks.market_statistics import capacity_of
from tests.lease_story import whole_story
from tidemill.pool.build_provider import trace_timetable
from tidemill.pool.provider import Change
from tidemill.pool.traces import CapacityTrace

TRACE = CapacityTrace.of([(0.0, 1), (100.0, 4), (200.0, 2), (300.0, 3), (400.0, 3)])


def test_counts_equal_the_trace() -> None:
    assert capacity_of(trace_timetable(TRACE), 400.0) == TRACE
    assert capacity_of(trace_timetable(TRACE, notice_s=30.0), 400.0) == TRACE


def test_a_trace_from_the_middle() -> None:
    found = capacity_of(trace_timetable(TRACE, start_s=150.0), 250.0)
    assert found == CapacityTrace(steps=((0.0, 4), (50.0, 2), (150.0, 3)), end_s=250.0)


def test_the_seed_chooses_evicted_machines() -> None:
    def victims(seed: int) -> tuple[int, ...]:
        changes = trace_timetable(TRACE, seed=seed)
        return tuple(change.place for change in changes if change.to == "down")

    assert victims(7) == victims(7)
    assert {victims(seed) for seed in range(100)} == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}


def test_a_notice_comes_before_the_count_falls() -> None:
    trace = CapacityTrace.of([(0.0, 2), (100.0, 0)])
    assert list(trace_timetable(trace, notice_s=30.0)) == [
        Change(time_s=0.0, place=0, to="up"),
        Change(time_s=0.0, place=1, to="up"),
        Change(time_s=70.0, place=0, to="noticed", deadline_s=100.0),
        Change(time_s=70.0, place=1, to="noticed", deadline_s=100.0),
        Change(time_s=100.0, place=0, to="down"),
        Change(time_s=100.0, place=1, to="down"),
    ]


def test_a_machine_shorter_than_its_notice_is_not_leased() -> None:
    trace = CapacityTrace.of([(0.0, 0), (10.0, 1), (15.0, 0), (20.0, 1), (60.0, 0)])
    story = whole_story(trace_timetable(trace, notice_s=30.0), until_s=99.0)
    assert story.granted == [(20.0, "spot-0")]
    assert [(time_s, event.deadline_s) for time_s, event in story.noticed] == [(30.0, 60.0)]
    assert [time_s for time_s, _ in story.ended] == [60.0]


def test_after_the_end_the_last_count_stays() -> None:
    story = whole_story(trace_timetable(TRACE), until_s=1e6)
    assert len(story.held) == 3
    assert story.told[-1][0] == 300.0


def test_starting_after_the_end_gives_the_last_count() -> None:
    assert capacity_of(trace_timetable(TRACE, start_s=1e6), 10.0).steps == ((0.0, 3),)
