"""The published policy on tiny fleets, against arithmetic done by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest

from tests.doubles.costs import ConstantEngine
from tests.doubles.samples import make_id
from tidemill.controller.router import Movable, Move, Waiting, WorkerLoad
from tidemill.core.records import GenerateRequest, PolicyVersion, SamplingParams, count, pack_tokens
from tidemill.sim.baselines import GroupEngine, GroupRouter, Moved, UnknownLengths, rlboost_components
from tidemill.sim.workload import BlankCompletions

V0 = PolicyVersion(number=0, digest="a")
ROUTER = GroupRouter(group_size=2, most_pending=2)


def waiting(*groups: int) -> list[Waiting]:
    """Two samples of each prompt, in order."""
    return [
        Waiting(ordinal=2 * group + index, group=("train", f"p{group}", 0), expected_tokens=1.0)
        for group in groups
        for index in (0, 1)
    ]


def load(name: str, assigned: int = 0, slots: int = 4) -> WorkerLoad:
    return WorkerLoad(lease_id=name, slots=slots, assigned=assigned)


def dispatched(groups: Sequence[int], *loads: WorkerLoad) -> dict[int, str]:
    return dict(ROUTER.dispatch(waiting(*groups), loads, queue_limit=0))


def held(**groups: Sequence[tuple[int, int]]) -> Callable[[str], list[Movable]]:
    """What each lease has: (prompt, tokens that each of its two samples has)."""
    return lambda lease_id: [
        Movable(
            ordinal=2 * group + index, group=("train", f"p{group}", 0), moves=0, expected_tokens=1.0, kept_tokens=kept
        )
        for group, kept in groups[lease_id]
        for index in (0, 1)
    ]


def moved(loads: Sequence[WorkerLoad], of: Callable[[str], list[Movable]], plateau: int = 4) -> list[Move]:
    return ROUTER.rebalance(loads, of, plateau=plateau, max_moves=9, queue_limit=0)


def test_groups_go_to_the_worker_with_the_fewest_pending() -> None:
    # a executes 4 and has one group pending, b executes 2: the first group fills b; then a has 1 pending and b none;
    # then both have 1, and a is the first of equals.
    found = dispatched([0, 1, 2], load("a", 6), load("b", 2))

    assert [found[ordinal] for ordinal in range(6)] == ["b", "b", "b", "b", "a", "a"]


def test_pending_requests_are_limited() -> None:
    # Both may have 2 groups pending beside the 4 samples they execute: one more for a, none for b.
    assert dispatched([0, 1], load("a", 6), load("b", 8)) == {0: "a", 1: "a"}
    assert dispatched([0]) == {}


def test_a_worker_without_queue_gets_a_pending_request() -> None:
    loads = [load("a", 8), load("b", 2)]

    moves = moved(loads, held(a=[(0, 5), (1, 5), (2, 0), (3, 0)], b=[(4, 5)]))

    # Both samples of the prompt that came last and has nothing yet.
    assert moves == [Move(ordinal=6, source="a", target="b"), Move(ordinal=7, source="a", target="b")]


def test_a_single_pending_request_does_not_move_to_a_full_worker() -> None:
    assert moved([load("a", 6), load("b", 4)], held(a=[(0, 5), (1, 5), (2, 0)], b=[(3, 5), (4, 5)])) == []


def test_an_idle_worker_gets_the_excess_over_the_plateau() -> None:
    loads = [load("a", 4), load("b", 0)]

    moves = moved(loads, held(a=[(0, 5), (1, 3)], b=[]), plateau=2)

    # 4 are executed, 2 on the plateau: the group with the fewer tokens goes.
    assert [move.ordinal for move in moves] == [2, 3]
    assert moved(loads, held(a=[(0, 5), (1, 3)], b=[]), plateau=4) == []


def test_rlboost_ignores_lengths() -> None:
    lengths = UnknownLengths()
    lengths.observe("p0", 8, [500])

    assert lengths.expected_remaining("p0", 8, 0, 1000) == lengths.expected_remaining("p1", 8, 700, 1000)


ALONE: Any = {"now_s": 0.0, "moved": "unfinished", "asked": {}}


def request(prompt: int, index: int, prefix: int) -> GenerateRequest:
    return GenerateRequest(
        sample_id=make_id(f"p{prompt}", index),
        lease_id="lease",
        attempt=2,
        prompt_ids=pack_tokens([1] * 10),
        prefix_ids=pack_tokens([1] * prefix),
        sampling=SamplingParams(max_new_tokens=50),
    )


def test_a_moved_group_is_truncated_to_its_shortest_sample() -> None:
    costs = ConstantEngine(slots=4, plateau=4, step_s=0.1, prefill_tokens_per_s=100.0)
    lengths = {("p0", 0): 6, ("p0", 1): 9, ("p1", 0): 7}
    engine = GroupEngine(costs, BlankCompletions(lambda sample: lengths[sample.prompt_id, sample.index]), **ALONE)
    engine.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)

    engine.submit([request(0, 0, 2), request(0, 1, 6), request(1, 0, 5)], 0.0)

    # p0's two samples begin from 2 tokens, p1's only one from its 5. To compute are 10 + 2 and 2 (the prompt is there)
    # and 10 + 5 tokens: 0.29 s. Then p1's needs 2 steps, p0's first 4, and its second 9 - 2 = 7, of which 4 are known.
    ends = []
    for _ in range(3):
        ends.append(engine.next_change_s())
        engine.advance(ends[-1])
    assert ends == pytest.approx([0.29 + 0.2, 0.29 + 0.4, 0.29 + 0.7])
    told = {(one.sample_id.prompt_id, one.sample_id.index): one for one in engine.take_ended()}
    assert {name: (one.start, count(one.token_ids)) for name, one in told.items()} == {
        ("p0", 0): (2, 4),
        ("p0", 1): (6, 3),
        ("p1", 0): (5, 2),
    }
    assert engine.generated == 4 + 7 + 2


def test_a_sample_recalled_early_keeps_its_prefix() -> None:
    costs = ConstantEngine(slots=4, plateau=4, step_s=0.1, prefill_tokens_per_s=1e9)
    engine = GroupEngine(costs, BlankCompletions(lambda _: 40), **ALONE)
    engine.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)
    engine.submit([request(0, 0, 2), request(0, 1, 6)], 0.0)

    engine.abort([request(0, 0, 2).sample_id, request(0, 1, 6).sample_id], 0.35)  # after 3 steps: 5 and 5 tokens

    assert [(one.start, count(one.token_ids), one.finish) for one in engine.take_ended()] == [
        (2, 3, "aborted"),
        (6, 0, "aborted"),
    ]


def engines(number: int, moved: Moved) -> list[GroupEngine]:
    """Engines that know of each other, four samples at once, 0.1 s a token: a prompt's first has 2, others 9."""
    costs = ConstantEngine(slots=4, plateau=4, step_s=0.1, prefill_tokens_per_s=1e9)
    completions, asked = BlankCompletions(lambda sample: 9 if sample.index else 2), dict[Any, Any]()
    made = [GroupEngine(costs, completions, now_s=0.0, moved=moved, asked=asked) for _ in range(number)]
    for engine in made:
        engine.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)
    return made


@pytest.mark.parametrize(
    ("moved", "called_back", "generated"),
    [
        ("unfinished", True, 5 + 5),
        ("all", True, 7 + 7),  # both go on from the 2 tokens of the one that had ended
        ("samples anew", True, 5 + 5),
        ("requests anew", True, 5 + 5),  # it told what it had
        ("unfinished", False, 9 + 9),
        ("all", False, 2 + 9 + 9),  # nothing was told of those that had not ended
        ("samples anew", False, 9 + 9),
        ("requests anew", False, 2 + 9 + 9),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_finished_samples_of_a_moved_group(moved: Moved, called_back: bool, back: bool, generated: int) -> None:
    first, other = engines(2, moved)
    first.submit([request(0, index, 0) for index in range(3)], 0.0)
    first.advance(0.45)
    assert [one.sample_id.index for one in first.take_ended()] == [0]
    if called_back:
        first.abort([request(0, index, 0).sample_id for index in (1, 2)], 0.45)
        first.take_ended()

    have = 4 if called_back else 0
    other = first if back and called_back else other  # it may come back to where it was
    before = other.generated
    other.submit([request(0, index, have) for index in (1, 2)], 0.5)
    other.advance(10.0)

    assert [(one.sample_id.index, one.start, count(one.token_ids)) for one in other.take_ended()] == [
        (1, have, 9 - have),
        (2, have, 9 - have),
    ]
    assert other.generated - before == generated


def test_a_request_lost_twice_is_regenerated_completely() -> None:
    three = engines(3, "requests anew")
    for engine, indices in zip(three, ((0, 1), (1,), (1,)), strict=True):
        engine.submit([request(0, index, 0) for index in indices], 0.0)
        engine.advance(0.15)
        told = [(one.sample_id.index, count(one.token_ids)) for one in engine.flush(0.15)]
        assert told == [(index, 1) for index in indices]  # of what is made again, nothing
        engine.advance(0.35)  # the first has ended, and the other has 3 tokens
    assert [engine.generated for engine in three] == [5, 5, 5]
    last = three[-1]
    last.advance(10.0)
    assert [one.sample_id.index for one in last.take_ended()] == [1]


def test_regenerated_samples_stay_with_their_group() -> None:
    first, other = engines(2, "all")
    first.submit([request(0, index, 0) for index in range(2)], 0.0)
    first.advance(0.45)
    other.submit([request(0, 1, 0)], 0.5)
    assert other.running == 2
    other.abort([request(0, 1, 0).sample_id], 0.5)
    assert (other.running, len(other.take_ended())) == (0, 1)


@pytest.mark.parametrize("moved", get_args(Moved))
def test_simulated_components_follow_their_settings(moved: Moved) -> None:
    factories = rlboost_components(2, moved=moved)
    costs = ConstantEngine(slots=4, plateau=4, step_s=0.1, prefill_tokens_per_s=1e9)
    first, other = (factories.engine(costs, BlankCompletions(lambda _: 9), now_s=0.0) for _ in range(2))
    for engine in (first, other):
        engine.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)
    first.submit([request(0, 0, 0), request(0, 1, 0)], 0.0)
    other.submit([request(0, 1, 0)], 0.0)

    assert other.running == (2 if moved in ("all", "requests anew") else 1)
    assert factories.final_report == (moved in ("unfinished", "all"))
