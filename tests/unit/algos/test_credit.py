from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.algos.advantages import ADVANTAGES
from tidemill.algos.credit import CREDITS, GroupTurns, gigpo, turn_returns
from tidemill.config.algorithm import AlgorithmConfig

GRPO, DR_GRPO = ADVANTAGES["grpo"], ADVANTAGES["dr_grpo"]
INVALID = None
# Trajectories of 2, 1 and 3 turns. Returns with γ = 0.5: (1 + 0.5 * 2, 2) = (2, 2); (4); (0 + 0.5 * (2 + 0.5 * 4),
# 2 + 0.5 * 4, 4) = (2, 4, 4).
REWARDS = [[1.0, 2.0], [4.0], [0.0, 2.0, 4.0]]
STATES = [["start", "a"], ["start"], ["start", "a", "start"]]


def turns(rewards: Sequence[Sequence[float] | None], states: Sequence[Sequence[str]] = ()) -> GroupTurns:
    """`INVALID` instead of rewards is an invalid member."""
    width = max(len(row) for row in rewards if row is not None)
    table, reached = torch.full((len(rewards), width), 0.0, dtype=torch.float64), torch.zeros(len(rewards), width)
    numbers, names = torch.zeros(len(rewards), width), sorted({state for row in states for state in row})
    for index, row in enumerate(rewards):
        if row is None:
            table[index] = math.nan
            continue
        table[index, : len(row)], reached[index, : len(row)] = torch.tensor(row, dtype=torch.float64), 1
        if states:
            numbers[index, : len(row)] = torch.tensor([float(names.index(state)) for state in states[index]])
    return GroupTurns(rewards_GN=table, reached_GN=reached.bool(), states_GN=numbers.long())


def rows(advantages: torch.Tensor, rewards: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """The advantages of existing turns; the others are 0."""
    found = advantages.tolist()
    lengths = [0 if row is None else len(row) for row in rewards]
    assert all(not any(row[length:]) for row, length in zip(found, lengths, strict=True))
    return [row[:length] for row, length in zip(found, lengths, strict=True)]


def test_turn_returns_by_hand() -> None:
    # turn 0: (2, 4, 2), mean 8/3; turn 1 has two trajectories: (2, 4), mean 3; turn 2 has one: 0
    found = rows(turn_returns(turns(REWARDS), DR_GRPO, turn_gamma=0.5), REWARDS)
    assert found[0] == pytest.approx([-2 / 3, -1])
    assert found[1] == pytest.approx([4 / 3])
    assert found[2] == pytest.approx([-2 / 3, 1, 0])


def test_turn_returns_divided_by_the_deviation() -> None:
    # turn 0: variance (4/9 + 16/9 + 4/9) / 2 = 4/3, std 1.1547005; -0.6666667 / 1.1547015 = -0.5773497, 1.1546995
    # turn 1: std sqrt(2) = 1.4142136; 1 / 1.4142146 = 0.7071063; turn 2: one trajectory, 0
    found = rows(turn_returns(turns(REWARDS), GRPO, turn_gamma=0.5), REWARDS)
    assert found[0] == pytest.approx([-0.5773497, -0.7071063], abs=1e-6)
    assert found[1] == pytest.approx([1.1546995], abs=1e-6)
    assert found[2] == pytest.approx([-0.5773497, 0.7071063, 0.0], abs=1e-6)


@pytest.mark.parametrize(("name", "levels"), [("turn_returns", 1), ("gigpo", 2)])
def test_the_floor_of_the_deviation(name: str, levels: int) -> None:
    # (0, 2e-6): mean 1e-6, std sqrt(2) e-6; 1e-6 / 2.4142136e-6 = 0.4142136, at both levels of gigpo
    found = credited(name, [[(0.0, "a")], [(2e-6, "a")]], advantage="grpo", step_weight=1.0)
    assert [row[0] for row in found] == pytest.approx([-0.4142136 * levels, 0.4142136 * levels], abs=1e-5)
    assert "(std" in CREDITS[name].formula and "+ 1e-6)" in CREDITS[name].formula


def test_an_invalid_member_has_no_part_in_turn_returns() -> None:
    # turn 0: (2, 4), mean 3; turn 1: one trajectory
    rewards = [REWARDS[0], REWARDS[1], INVALID]
    found = rows(turn_returns(turns(rewards), DR_GRPO, turn_gamma=0.5), rewards)
    assert found == [pytest.approx([-1.0, 0.0]), pytest.approx([1.0]), []]


def test_gigpo_by_hand() -> None:
    """Episodes: (3, 4, 6), mean 13/3: -4/3, -1/3, 5/3.

    Anchor "start", four steps: (2, 4, 2, 4), mean 3: -1, 1, -1, 1, of which the third trajectory has two. Anchor "a":
    (2, 4), mean 3: -1, 1.
    """
    found = rows(gigpo(turns(REWARDS, STATES), DR_GRPO, turn_gamma=0.5, step_weight=1.0), REWARDS)
    assert found[0] == pytest.approx([-4 / 3 - 1, -4 / 3 - 1])
    assert found[1] == pytest.approx([-1 / 3 + 1])
    assert found[2] == pytest.approx([5 / 3 - 1, 5 / 3 + 1, 5 / 3 + 1])


def test_gigpo_weighs_steps() -> None:
    found = rows(gigpo(turns(REWARDS, STATES), DR_GRPO, turn_gamma=0.5, step_weight=0.25), REWARDS)
    assert found[0] == pytest.approx([-4 / 3 - 0.25, -4 / 3 - 0.25])


def test_a_state_that_no_other_step_has_adds_nothing() -> None:
    states = [["start", "b"], ["start"], ["start", "a", "c"]]
    # "start": (2, 4, 2), mean 8/3
    found = rows(gigpo(turns(REWARDS, states), DR_GRPO, turn_gamma=0.5, step_weight=1.0), REWARDS)
    assert found[0] == pytest.approx([-4 / 3 - 2 / 3, -4 / 3])
    assert found[2] == pytest.approx([5 / 3 - 2 / 3, 5 / 3, 5 / 3])


def test_gigpo_with_deviations() -> None:
    # episodes: variance (16/9 + 1/9 + 25/9) / 2 = 7/3, std 1.5275252; -1.3333333 / 1.5275262 = -0.8728710
    # "a": -1 / (sqrt(2) + 0.000001) = -0.7071063
    found = rows(gigpo(turns(REWARDS, STATES), GRPO, turn_gamma=0.5, step_weight=1.0), REWARDS)
    assert found[0][1] == pytest.approx(-0.8728710 - 0.7071063, abs=1e-6)


def test_an_invalid_member_is_no_anchor() -> None:
    # episodes: (3, 4), mean 3.5; "start": (2, 4), mean 3; "a" has one step left
    rewards = [REWARDS[0], REWARDS[1], INVALID]
    found = rows(gigpo(turns(rewards, STATES), DR_GRPO, turn_gamma=0.5, step_weight=1.0), rewards)
    assert found == [pytest.approx([-0.5 - 1, -0.5]), pytest.approx([0.5 + 1]), []]


def test_equal_returns_give_exact_zeros() -> None:
    """0.1 + 0.2 and 0.3 + 0 differ in double precision."""
    group = turns([[0.1, 0.2], [0.3, 0.0]], [["a", "b"], ["a", "c"]])
    for advantage in (GRPO, DR_GRPO):
        assert gigpo(group, advantage, turn_gamma=1.0, step_weight=1.0).tolist() == [[0.0, 0.0]] * 2
        assert turn_returns(group, advantage, turn_gamma=1.0)[:, 0].tolist() == [0.0, 0.0]


def test_one_turn_each_is_the_advantage_of_the_outcome() -> None:
    rewards = torch.tensor([1.0, 4.0, 6.0])
    group = turns([[1.0], [4.0], [6.0]], [["a"], ["b"], ["c"]])
    for advantage in (GRPO, DR_GRPO, ADVANTAGES["rloo"]):
        floor = {"floor": 1e-6} if advantage.deviation else {}
        outcome = advantage.function(rewards, torch.ones(3, dtype=torch.bool), **floor)
        assert torch.equal(gigpo(group, advantage, turn_gamma=0.5, step_weight=1.0)[:, 0], outcome)


NUMBERS = st.floats(-5, 5).map(lambda value: round(value, 2))
GROUPS = st.lists(st.lists(st.tuples(NUMBERS, st.sampled_from("abc")), min_size=1, max_size=4), min_size=2, max_size=5)
Members = list[list[tuple[float, str]]]


def credited(
    name: str, members: Members, *, gamma: float = 0.9, advantage: str = "dr_grpo", step_weight: float = 0.5
) -> list[list[float]]:
    rewards, states = [[r for r, _ in row] for row in members], [[s for _, s in row] for row in members]
    settings = {"turn_gamma": gamma, "step_weight": step_weight}
    credit = CREDITS[name]
    chosen = {key: settings[key] for key in credit.settings}
    return rows(credit.function(turns(rewards, states), ADVANTAGES[advantage], **chosen), rewards)


@pytest.mark.parametrize("name", CREDITS)
@given(members=GROUPS, seed=st.randoms(use_true_random=False))
def test_the_order_of_the_group_does_not_matter(name: str, members: Members, seed: object) -> None:
    order = list(range(len(members)))
    seed.shuffle(order)  # type: ignore[attr-defined]
    expected = [credited(name, members)[at] for at in order]
    for row, other in zip(credited(name, [members[at] for at in order]), expected, strict=True):
        assert row == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("name", CREDITS)
@given(members=GROUPS, shift=NUMBERS)
def test_a_constant_added_to_every_last_reward_changes_nothing(
    name: str, advantage: str, members: Members, shift: float
) -> None:
    """With γ = 1 all returns of the group move by it; rewards differ by 0.01 or more, or are equal."""
    moved = [[*row[:-1], (row[-1][0] + shift, row[-1][1])] for row in members]
    expected = credited(name, members, gamma=1.0, advantage=advantage)
    for row, other in zip(credited(name, moved, gamma=1.0, advantage=advantage), expected, strict=True):
        assert row == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("name", CREDITS)
@given(members=GROUPS)
def test_the_first_turn_has_mean_zero(name: str, members: Members) -> None:
    if name == "gigpo":  # every first turn sees the same state, which does not occur again
        members = [[(row[0][0], "start"), *row[1:]] for row in members]
    first = [row[0] for row in credited(name, members)]
    assert sum(first) == pytest.approx(0.0, abs=1e-4)


def test_the_defaults_of_gigpo_do_not_divide_by_a_deviation() -> None:
    assert AlgorithmConfig.model_validate({"credit": "gigpo"}).advantage == "dr_grpo"
    assert AlgorithmConfig.model_validate({"credit": "gigpo", "advantage": "grpo"}).advantage == "grpo"
    assert AlgorithmConfig.model_validate({"name": "rloo", "credit": "gigpo"}).advantage == "rloo"
    assert AlgorithmConfig.model_validate({"credit": "turn_returns"}).advantage == "grpo"
