"""Groups in canonical order, in order of arrival, and what is left out of the loss."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fabricated_run import make_trajectory
from tests.fake_fleet import make_id, make_prompt
from tidemill.controller.assembly import GroupAssembly, scored
from tidemill.controller.batch import plan_batch
from tidemill.core.records import Reward, SamplingParams, Trajectory

PROMPTS = [make_prompt(f"p{at}") for at in range(3)]
PLAN = plan_batch(
    1, [(0, prompt) for prompt in PROMPTS], run_seed=0, group_size=2, sampling=SamplingParams(max_new_tokens=4)
)
SAMPLES = [(position, index) for position in range(3) for index in range(2)]


def trajectory(position: int, index: int) -> Trajectory:
    base = make_trajectory(make_prompt(f"p{position}"), "12", index=index)
    return msgspec.structs.replace(base, sample_id=make_id(f"p{position}", index))


@given(st.permutations(SAMPLES))
def test_canonical_order_is_by_position_whatever_arrives_first(arrivals: list[tuple[int, int]]) -> None:
    assembly = GroupAssembly(PLAN, "canonical")
    arrived: set[tuple[int, int]] = set()
    released: list[int] = []
    for position, index in arrivals:
        arrived.add((position, index))
        groups = assembly.add(trajectory(position, index))
        for group in groups:
            assert [t.sample_id.index for t in group.trajectories] == [0, 1]
        released += [group.position for group in groups]
        # released: exactly the longest run of complete groups from the first on
        complete = [{(at, 0), (at, 1)} <= arrived for at in range(3)]
        assert released == list(range(complete.index(False) if False in complete else 3))


@given(st.permutations(SAMPLES))
def test_arrival_order_releases_a_group_with_its_last_sample(arrivals: list[tuple[int, int]]) -> None:
    assembly = GroupAssembly(PLAN, "arrival")

    released = [(group.position, at) for at, who in enumerate(arrivals) for group in assembly.add(trajectory(*who))]

    last = {position: max(arrivals.index((position, index)) for index in range(2)) for position in range(3)}
    assert released == sorted(last.items(), key=lambda item: item[1])


def test_the_two_orders_differ() -> None:
    backwards = [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
    orders: dict[str, list[int]] = {}
    for order in ("canonical", "arrival"):
        assembly = GroupAssembly(PLAN, order)
        orders[order] = [group.position for who in backwards for group in assembly.add(trajectory(*who))]

    assert orders == {"canonical": [0, 1, 2], "arrival": [2, 0, 1]}


@pytest.mark.parametrize(
    ("completion", "finish", "valid", "truncated", "weight"),
    [
        ("12", "stop", True, "trained", 1.0),
        ("12", "length", True, "trained", 1.0),
        ("12", "length", True, "masked", 0.0),
        ("12", "stop", True, "masked", 1.0),
        ("12", "stop", False, "trained", 0.0),
        ("", "stop", True, "trained", 0.0),
    ],
)
def test_what_is_left_out(completion: str, finish: str, valid: bool, truncated: Any, weight: float) -> None:
    reward = Reward(value=1.0, valid=valid)

    result = scored(make_trajectory(PROMPTS[0], completion, finish=finish), reward, truncated=truncated)

    assert (result.weight, result.reward) == (weight, reward)
