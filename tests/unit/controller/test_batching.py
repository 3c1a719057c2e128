"""Batches of groups in canonical order and in order of arrival, and samples with weight 0."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.doubles.samples import make_id, make_prompt
from tests.fabricated_run import make_trajectory
from tidemill.controller.batching import BatchBuilder, GroupAssembly, Order, has_signal, scored
from tidemill.core.records import Reward, Trajectory

SAMPLES = [(position, index) for position in range(3) for index in range(2)]


def trajectory(position: int, index: int, reward: float = 0.0) -> Trajectory:
    base = make_trajectory(make_prompt(f"p{position}"), "12", index=index, reward=Reward(value=reward))
    return msgspec.structs.replace(base, sample_id=make_id(f"p{position}", index))


def released(arrivals: Sequence[tuple[int, int]], order: Order) -> list[tuple[int, int]]:
    """(position, after how many samples) of a planned batch of three groups."""
    assembly, forming = GroupAssembly(2), BatchBuilder(1, 3, membership="planned", order=order)
    taken = []
    for at, (position, index) in enumerate(arrivals):
        assembly.add(position, trajectory(position, index))
        untaken = {position: 1 for position in range(3) if position not in forming.taken}
        for each in forming.take(list(assembly.complete), untaken):
            assert [t.sample_id.index for t in assembly.complete.pop(each)] == [0, 1]
            taken.append((each, at))
    assert forming.full
    return taken


@given(st.permutations(SAMPLES))
def test_canonical_order_is_by_position_whatever_arrives_first(arrivals: list[tuple[int, int]]) -> None:
    complete_at = [max(arrivals.index((position, index)) for index in range(2)) for position in range(3)]

    assert released(arrivals, "canonical") == [(position, max(complete_at[: position + 1])) for position in range(3)]


@given(st.permutations(SAMPLES))
def test_arrival_order_releases_a_group_with_its_last_sample(arrivals: list[tuple[int, int]]) -> None:
    last = {position: max(arrivals.index((position, index)) for index in range(2)) for position in range(3)}

    assert released(arrivals, "arrival") == sorted(last.items(), key=lambda item: item[1])


def at_any_time(*positions: int) -> dict[int, int | None]:
    return dict.fromkeys(positions)


def test_a_planned_batch_takes_no_group_of_the_next_one() -> None:
    forming = BatchBuilder(1, 2, membership="planned", order="arrival")

    assert forming.take([2, 1], at_any_time(0, 1, 2, 3)) == [1]
    assert forming.take([2], at_any_time(0, 2, 3)) == []  # the last place is reserved for group 0
    assert forming.take([2, 3], at_any_time(2, 3)) == [2]  # group 0 was dropped
    assert forming.full


def test_first_finished_reserves_places_for_groups_at_the_lag_limit() -> None:
    forming = BatchBuilder(5, 3, membership="first_finished", order="arrival")

    # groups 0 and 5 must be trained on in this step: a place is reserved for group 0
    assert forming.take([7, 5, 6], {0: 5, 1: 7, 2: 7, 5: 5, 6: 7, 7: 7}) == [7, 5]
    assert forming.take([6], {0: 5, 1: 7, 2: 7, 6: 7}) == []
    assert forming.take([6, 0], {0: 5, 1: 7, 2: 7, 6: 7}) == [0]


def test_first_finished_reserves_places_in_later_batches() -> None:
    forming = BatchBuilder(1, 2, membership="first_finished", order="arrival")

    # four groups must be in steps 1 and 2, which have four places: none remains for group 9
    assert forming.take([9, 2], {0: 2, 1: 2, 2: 2, 3: 2, 9: 4}) == [2]


@given(st.lists(st.integers(3, 6), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_every_group_can_be_trained_on_in_time(latest: list[int], random: Random) -> None:
    in_flight: dict[int, int | None] = dict(enumerate(sorted(latest)))
    feasible = all(at < (last - 2) * 2 for at, last in enumerate(sorted(latest)))  # two places per step, from step 3
    assume(feasible)
    for step in range(3, 7):
        forming = BatchBuilder(step, 2, membership="first_finished", order="arrival")
        complete: list[int] = []
        while not forming.full and in_flight:
            complete.append(random.choice([position for position in in_flight if position not in complete]))
            for position in forming.take(complete, in_flight):
                last = in_flight.pop(position)
                assert last is not None
                assert last >= step
                complete.remove(position)
    assert not in_flight


def test_first_finished_in_canonical_order_is_sorted_when_full() -> None:
    forming = BatchBuilder(1, 3, membership="first_finished", order="canonical")

    assert forming.take([7, 5], at_any_time(*range(8))) == []
    assert [forming.may_take(complete) for complete in (2, 3, 4)] == [False, True, True]
    assert forming.take([7, 5, 1, 0], at_any_time(*range(8))) == [1, 5, 7]


def test_may_take_depends_on_the_number_of_complete_groups() -> None:
    forming = BatchBuilder(1, 3, membership="first_finished", order="arrival")
    assert [forming.may_take(complete) for complete in (0, 1)] == [False, True]


def test_blocked_by_names_the_incomplete_group() -> None:
    forming = BatchBuilder(5, 2, membership="first_finished", order="canonical")

    assert forming.take([1, 3], {0: 7, 1: 6, 2: 5, 3: 6}) == []
    assert forming.blocked_by == 2  # the only group that step 6 must not train on
    assert forming.take([1, 3, 2], {0: 7, 1: 6, 2: 5, 3: 6}) == [1, 2]


@given(st.lists(st.integers(3, 5) | st.none(), min_size=3, max_size=8), st.randoms(use_true_random=False))
def test_nothing_is_taken_while_the_blocking_group_is_incomplete(latest: list[int | None], random: Random) -> None:
    in_flight, arrivals = dict(enumerate(latest)), random.sample(range(len(latest)), len(latest))
    forming = BatchBuilder(3, 3, membership="first_finished", order="canonical")
    for at in range(1, len(arrivals) + 1):
        complete, blocked_by = arrivals[:at], forming.blocked_by
        waits = blocked_by is not None and blocked_by not in complete

        assert not (forming.take(complete, in_flight) and waits)


def test_a_recorded_batch_is_taken_in_its_order() -> None:
    forming = BatchBuilder(1, 3, membership="planned", order="canonical", recorded=[4, 2])

    assert forming.take([2], at_any_time(*range(5))) == []
    assert forming.take([0, 2, 4], at_any_time(*range(5))) == [4, 2]
    assert forming.full


def test_restarted_samples_make_their_group_incomplete() -> None:
    assembly = GroupAssembly(2)
    assert not assembly.add(0, trajectory(0, 1))
    assert assembly.add(0, trajectory(0, 0))

    assembly.forget(0, [make_id("p0", 1)])

    assert not assembly.complete
    assert assembly.add(0, trajectory(0, 1))
    assembly.forget(0)
    assert not assembly.add(0, trajectory(0, 1))


def test_a_group_has_signal_when_its_valid_rewards_differ() -> None:
    left_out = msgspec.structs.replace(trajectory(0, 2, 9.0), weight=0.0)

    assert has_signal([trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)])
    assert not has_signal([trajectory(0, 0, 1.0), trajectory(0, 1, 1.0), left_out])
    assert not has_signal([])


@pytest.mark.parametrize(
    ("completion", "finish", "valid", "truncated", "weight"),
    [
        ("12", "stop", True, "trained", 1.0),
        ("12", "length", True, "trained", 1.0),
        ("12", "length", True, "masked", 0.0),
        ("12", "turns", True, "masked", 1.0),
        ("12", "stop", True, "masked", 1.0),
        ("12", "stop", False, "trained", 0.0),
        ("", "stop", True, "trained", 0.0),
    ],
)
def test_samples_with_weight_zero(completion: str, finish: str, valid: bool, truncated: Any, weight: float) -> None:
    reward = Reward(value=1.0, valid=valid)

    result = scored(make_trajectory(make_prompt("p0"), completion, finish=finish), reward, truncated=truncated)

    assert (result.weight, result.reward) == (weight, reward)
