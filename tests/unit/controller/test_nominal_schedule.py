"""The nominal schedule: ranks of groups by the lengths of their samples."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest

from tests.doubles.samples import make_id, make_prompt
from tidemill.controller.nominal_schedule import NominalSchedule
from tidemill.controller.samples import Sample


def sample_of(ordinal: int, length: int, *, ended: bool = True) -> Sample:
    sample = Sample(sample_id=make_id(index=ordinal), ordinal=ordinal, prompt=make_prompt("p"))
    sample.token_ids = bytearray(4 * length)
    sample.finish = "stop" if ended else None
    return sample


def ranks(schedule: NominalSchedule, lengths: Sequence[int]) -> list[int]:
    samples = {ordinal: sample_of(ordinal, length) for ordinal, length in enumerate(lengths)}
    found = []
    while (position := schedule.advance(samples)) is not None:
        found.append(position)
    return found


def test_with_unlimited_slots_the_longest_sample_ranks_a_group_and_ties_are_broken_by_position() -> None:
    schedule = NominalSchedule(0, samples_per_group=2, needed=2)
    schedule.add(range(8))
    assert ranks(schedule, [5, 1, 3, 4, 4, 2, 9, 1]) == [1, 2, 0, 3]  # longest: 5, 4, 4, 9
    assert schedule.clock == 9


def test_with_one_slot_groups_end_in_the_order_of_the_round() -> None:
    schedule = NominalSchedule(1, samples_per_group=1, needed=1)
    schedule.add([2, 0, 1])
    assert ranks(schedule, [5, 1, 7]) == [2, 0, 1]
    assert schedule.clock == 13


def test_a_sample_starts_when_a_slot_is_free() -> None:
    schedule = NominalSchedule(2, samples_per_group=1, needed=1)
    schedule.add(range(4))
    # Slot one: 0 (0-6); slot two: 1 (0-2), 2 (2-5), 3 (5-6); 0 and 3 both end at 6.
    assert ranks(schedule, [6, 2, 3, 1]) == [1, 2, 0, 3]


def test_the_clock_stops_at_the_first_sample_that_could_still_end_before_others() -> None:
    schedule = NominalSchedule(0, samples_per_group=1, needed=1)
    schedule.add(range(3))
    samples = {0: sample_of(0, 4), 1: sample_of(1, 4, ended=False), 2: sample_of(2, 9)}
    assert schedule.advance(samples) == 0  # sample 1 has 4 tokens: it may end with them, but 0 comes first
    assert schedule.advance(samples) is None
    assert schedule.waits_for == (1, 4)
    samples[1] = sample_of(1, 9, ended=False)
    assert schedule.advance(samples) is None  # it may end at 9, before 2
    samples[1] = sample_of(1, 10, ended=False)
    assert schedule.advance(samples) == 2
    assert [schedule.seen(samples[at]) for at in range(3)] == [(4, True), (9, False), (9, True)]


def test_a_group_that_needs_fewer_samples_than_it_has_keeps_those_that_end_first() -> None:
    schedule = NominalSchedule(3, samples_per_group=3, needed=2)
    schedule.add(range(6))
    # Group 0 has lengths 9, 2, 4 and is complete at 4; its first sample leaves its slot then, and group 1 starts:
    # sample 3 at 2, samples 4 and 5 at 4.
    samples = {ordinal: sample_of(ordinal, length) for ordinal, length in enumerate([9, 2, 4, 5, 1, 8])}
    assert schedule.advance(samples) == 0
    assert (schedule.clock, schedule.kept(0)) == (4, [1, 2])
    assert schedule.advance(samples) == 1
    assert (schedule.clock, schedule.kept(1)) == (7, [4, 3])


def straight(lengths: Sequence[int], order: Sequence[int], slots: int, size: int) -> list[int]:
    """Ranks by list scheduling with all lengths known."""
    free, ends = [0] * slots, dict[int, tuple[int, int]]()
    for ordinal in order:
        end = heapq.heappop(free) + lengths[ordinal]
        heapq.heappush(free, end)
        ends[ordinal // size] = max(ends.get(ordinal // size, (0, 0)), (end, ordinal))
    return sorted(ends, key=lambda position: ends[position])


@pytest.mark.parametrize("slots", [1, 3, 7, 40])
@pytest.mark.parametrize("seed", range(20))
def test_ranks_do_not_depend_on_the_order_in_which_tokens_arrive(slots: int, seed: int) -> None:
    draw = random.Random(f"{slots} {seed}")
    size = draw.choice([1, 2, 4])
    lengths = [draw.randint(1, 30) for _ in range(10 * size)]
    order = list(range(len(lengths)))
    draw.shuffle(order)
    schedule = NominalSchedule(slots, samples_per_group=size, needed=size)
    schedule.add(order)
    have = [0] * len(lengths)
    found: list[int] = []
    while len(found) < 10:
        ordinal = draw.randrange(len(lengths))  # tokens of any sample, in any order
        have[ordinal] = min(lengths[ordinal], have[ordinal] + draw.randint(1, 12))
        samples = {at: sample_of(at, have[at], ended=have[at] == lengths[at]) for at in range(len(lengths))}
        while (position := schedule.advance(samples)) is not None:
            found.append(position)
    assert found == straight(lengths, order, slots, size)
