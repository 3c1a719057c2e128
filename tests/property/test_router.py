"""For any fleet: no worker idles while samples wait, no sample is assigned twice, no sample moves in circles."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.controller.router import Movable, Move, Waiting, WorkerLoad, dispatch, rebalance

GROUPS = [("train", f"p{index}", 0) for index in range(5)]
LIMIT = 3
MAX_MOVES = 2


def of(held: Mapping[str, Sequence[Movable]]) -> Callable[[str], Sequence[Movable]]:
    return lambda lease_id: held.get(lease_id, ())


def make_load(
    name: int, slots: int = 4, assigned: int = 0, groups: Sequence[int] = (), tokens_left: float = math.inf
) -> WorkerLoad:
    held = frozenset(GROUPS[group] for group in groups)
    return WorkerLoad(lease_id=f"lease {name}", slots=slots, assigned=assigned, groups=held, tokens_left=tokens_left)


def make_waiting(ordinal: int, group: int = 0, expected: float = 8.0, lost: str = "") -> Waiting:
    return Waiting(ordinal=ordinal, group=GROUPS[group], expected_tokens=expected, lost_lease=lost)


def make_movable(ordinal: int, *, moves: int, expected: float, kept: int) -> Movable:
    return Movable(ordinal=ordinal, group=GROUPS[0], moves=moves, expected_tokens=float(expected), kept_tokens=kept)


@st.composite
def fleets(draw: st.DrawFn, ending: bool = False) -> list[WorkerLoad]:
    groups = st.sets(st.integers(0, 4), max_size=3)
    tokens_left = st.sampled_from([0.0, 1.5, 2.5] if ending else [math.inf]) | st.just(math.inf)
    rows = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 14), groups, tokens_left), max_size=7))
    return [
        make_load(name, slots, assigned, sorted(groups), left)
        for name, (slots, assigned, groups, left) in enumerate(rows)
    ]


@st.composite
def queues(draw: st.DrawFn, lost: bool = False) -> list[Waiting]:
    leases = st.sampled_from(["", *(f"lease {name}" for name in range(7))]) if lost else st.just("")
    rows = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), leases), max_size=60))
    return [
        make_waiting(ordinal, group, float(expected), lease) for ordinal, (group, expected, lease) in enumerate(rows)
    ]


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[WorkerLoad], dict[str, list[Movable]]]:
    """A fleet with its samples, some of which may not move."""
    loads, ordinal = draw(fleets()), 0
    held: dict[str, list[Movable]] = {}
    for load in loads:
        rows = draw(
            st.lists(
                st.tuples(st.integers(0, MAX_MOVES), st.integers(1, 9), st.integers(0, 3)),
                min_size=load.assigned // 2,
                max_size=load.assigned,
            )
        )
        samples = held.setdefault(load.lease_id, [])
        for moves, expected, kept in rows:
            samples.append(make_movable(ordinal, moves=moves, expected=expected, kept=kept))
            ordinal += 1
    return loads, held


def after(loads: Sequence[WorkerLoad], decided: Sequence[tuple[int, str]]) -> list[WorkerLoad]:
    more = Counter(lease for _, lease in decided)
    return [msgspec.structs.replace(load, assigned=load.assigned + more[load.lease_id]) for load in loads]


def evenly(loads: Sequence[WorkerLoad], samples: int) -> Counter[str]:
    """Samples per worker when they are placed one by one on the least loaded worker."""
    assigned = {load.lease_id: load.assigned for load in loads}

    def rank(load: WorkerLoad) -> tuple[float, ...]:
        mine = assigned[load.lease_id]
        return (max(mine + 1 - load.slots, 0), mine / load.slots, -load.slots, int(load.lease_id.split()[1]))

    for _ in range(samples):
        open_ = [load for load in loads if assigned[load.lease_id] < load.slots + LIMIT]
        if open_:
            assigned[min(open_, key=rank).lease_id] += 1
    return Counter({load.lease_id: assigned[load.lease_id] - load.assigned for load in loads})


@given(fleets(ending=True), queues(lost=True))
def test_samples_are_dispatched_once_and_free_slots_come_first(loads: list[WorkerLoad], waiting: list[Waiting]) -> None:
    decided = dispatch(waiting, loads, queue_limit=LIMIT)

    given_away = [ordinal for ordinal, _ in decided]
    room = sum(max(load.slots + LIMIT - load.assigned, 0) for load in loads)
    assert len(set(given_away)) == len(given_away) == min(len(waiting), room)
    now = after(loads, decided)
    queued = any(new.assigned > max(old.assigned, old.slots) for old, new in zip(loads, now, strict=True))
    if queued or len(decided) < len(waiting):
        assert all(load.assigned >= load.slots for load in now)
    for old, new in zip(loads, now, strict=True):
        assert new.assigned <= max(old.assigned, old.slots + LIMIT)


@given(fleets(), queues())
def test_no_worker_idles_because_of_a_cached_prefix(loads: list[WorkerLoad], waiting: list[Waiting]) -> None:
    decided = dispatch(waiting, loads, queue_limit=LIMIT)

    now = {load.lease_id: load.assigned for load in after(loads, decided)}
    if 0 in now.values():
        assert all(now[lease] == 1 for _, lease in decided)


@given(fleets(), queues(lost=True))
def test_the_longest_are_dispatched_first_and_siblings_in_order(
    loads: list[WorkerLoad], waiting: list[Waiting]
) -> None:
    decided = dispatch(waiting, loads, queue_limit=LIMIT)

    ranked = sorted(waiting, key=lambda sample: (-sample.expected_tokens, sample.ordinal))
    assert [ordinal for ordinal, _ in decided] == [sample.ordinal for sample in ranked][: len(decided)]


@given(fleets(), queues())
def test_without_prefixes_the_load_equals_sequential_placement(loads: list[WorkerLoad], waiting: list[Waiting]) -> None:
    fresh = [msgspec.structs.replace(load, groups=frozenset()) for load in loads]

    decided = dispatch(waiting, fresh, queue_limit=LIMIT)

    assert Counter(lease for _, lease in decided) == evenly(fresh, len(waiting))


@given(fleets(), queues())
def test_a_prefix_costs_a_worker_at_most_one_sample_more_than_even(
    loads: list[WorkerLoad], waiting: list[Waiting]
) -> None:
    small = [msgspec.structs.replace(load, slots=min(load.slots, 15)) for load in loads]  # 15 // 8 = 1

    decided = dispatch(waiting, small, queue_limit=LIMIT)

    even, counts = evenly(small, len(waiting)), Counter(lease for _, lease in decided)
    assert all(counts[load.lease_id] <= even[load.lease_id] + 1 for load in small)


@given(fleets(), queues(lost=True), st.randoms())
def test_dispatch_does_not_depend_on_the_order_of_its_input(
    loads: list[WorkerLoad], waiting: list[Waiting], source: random.Random
) -> None:
    decided = dispatch(waiting, loads, queue_limit=LIMIT)

    source.shuffle(loads)
    source.shuffle(waiting)
    assert dispatch(waiting, loads, queue_limit=LIMIT) == decided


def test_a_batch_that_fills_the_fleet_has_every_group_on_one_worker() -> None:
    waiting = [make_waiting(ordinal, group=ordinal // 8) for ordinal in range(32)]
    loads = [make_load(name, slots=8) for name in range(4)]

    decided = dispatch(waiting, loads, queue_limit=LIMIT)

    assert Counter(decided_to for _, decided_to in decided) == {f"lease {name}": 8 for name in range(4)}
    assert len({(ordinal // 8, lease) for ordinal, lease in decided}) == 4


def test_queued_samples_join_their_siblings() -> None:
    waiting = [make_waiting(ordinal, group=ordinal // 5) for ordinal in range(10)]

    decided = dispatch(waiting, [make_load(0), make_load(1)], queue_limit=LIMIT)

    # Free slots: four of the first group; its fifth and three of the second. Queued: one sample each.
    assert decided[3:] == [(3, "lease 0"), *((ordinal, "lease 1") for ordinal in range(4, 9)), (9, "lease 0")]


def test_a_small_batch_is_spread_over_the_fleet() -> None:
    waiting = [make_waiting(ordinal, group=ordinal // 4) for ordinal in range(8)]
    loads = [make_load(name, slots=64) for name in range(4)]

    decided = dispatch(waiting, loads, queue_limit=LIMIT)

    assert decided == [(ordinal, f"lease {ordinal // 2}") for ordinal in range(8)]


@pytest.mark.parametrize(
    ("assigned", "expected"),
    [
        ((3, 2), "lease 0"),  # one sample of slack, and both have free slots
        ((4, 2), "lease 1"),  # two more than the least loaded
        ((1, 0), "lease 1"),  # an idle worker comes first
        ((8, 7), "lease 1"),  # no free slot
        ((10, 9), "lease 0"),  # queues: 2 and 1
        ((11, 9), "lease 1"),  # queues: 3, which is two more, and 1
        ((12, 11), "lease 1"),  # queues: 4, which is the limit, and 3
    ],
)
def test_a_cached_prefix_decides_if_loads_are_about_even(assigned: tuple[int, int], expected: str) -> None:
    loads = [make_load(0, 8, assigned[0], groups=[0]), make_load(1, 8, assigned[1])]

    assert dispatch([make_waiting(0)], loads, queue_limit=4) == [(0, expected)]


def test_a_sample_returns_to_the_worker_that_lost_it_only_if_no_other_has_a_free_slot() -> None:
    both = [make_load(0, groups=[0]), make_load(1, assigned=3)]

    assert dispatch([make_waiting(0, lost="lease 0")], both, queue_limit=LIMIT) == [(0, "lease 1")]
    assert dispatch([make_waiting(0, lost="lease 0")], both[:1], queue_limit=LIMIT) == [(0, "lease 0")]


def moved(
    loads: Sequence[WorkerLoad], held: dict[str, list[Movable]], moves: Sequence[Move]
) -> tuple[list[WorkerLoad], dict[str, list[Movable]]]:
    """The fleet after the moves."""
    samples = {sample.ordinal: sample for group in held.values() for sample in group}
    change = Counter(move.target for move in moves)
    change.subtract(Counter(move.source for move in moves))
    target = {move.ordinal: move.target for move in moves}
    now: dict[str, list[Movable]] = {lease: [] for lease in held}
    for lease, group in held.items():
        for sample in group:
            more = sample.ordinal in target
            now[target.get(sample.ordinal, lease)].append(
                msgspec.structs.replace(samples[sample.ordinal], moves=sample.moves + more)
            )
    return [msgspec.structs.replace(load, assigned=load.assigned + change[load.lease_id]) for load in loads], now


def test_a_worker_that_just_received_samples_loses_none() -> None:
    """Found by the property below: a worker took from a queue, and an idle worker took from it in turn."""
    loads = [make_load(0, slots=1, assigned=6), make_load(1, slots=3), make_load(2, slots=5, assigned=1)]
    crowded, idle, busy = (load.lease_id for load in loads)
    held = {crowded: make_held(*((at, 1.0, 0) for at in range(5))), idle: [], busy: make_held((5, 1.0, 0))}

    moves = rebalance(loads, of(held), plateau=0, max_moves=MAX_MOVES, queue_limit=LIMIT)

    assert {move.source for move in moves} == {crowded}


@given(crowds(), st.integers(0, 6))
def test_moves_are_bounded_help_and_reach_a_fixed_point(
    crowd: tuple[list[WorkerLoad], dict[str, list[Movable]]], plateau: int
) -> None:
    loads, held = crowd

    moves = rebalance(loads, of(held), plateau=plateau, max_moves=MAX_MOVES, queue_limit=LIMIT)

    before = {load.lease_id: load for load in loads}
    where = {sample.ordinal: (lease, sample) for lease, samples in held.items() for sample in samples}
    assert len({move.ordinal for move in moves}) == len(moves)
    for move in moves:
        lease, sample = where[move.ordinal]
        assert lease == move.source != move.target
        assert sample.moves < MAX_MOVES
    now, held_now = moved(loads, held, moves)
    for target in (load for load in now if load.assigned > before[load.lease_id].assigned):
        sources = {move.source for move in moves if move.target == target.lease_id}
        assert all(target.assigned / target.slots < before[s].assigned / before[s].slots
                   or target.assigned < before[s].assigned for s in sources)  # fmt: skip
    assert rebalance(now, of(held_now), plateau=plateau, max_moves=MAX_MOVES, queue_limit=LIMIT) == []


@given(crowds())
def test_no_slot_stays_free_while_a_movable_sample_is_queued(
    crowd: tuple[list[WorkerLoad], dict[str, list[Movable]]],
) -> None:
    loads, held = crowd

    moves = rebalance(loads, of(held), plateau=4, max_moves=MAX_MOVES, queue_limit=LIMIT)

    now, held_now = moved(loads, held, moves)
    free = any(load.assigned < load.slots for load in now)
    room = any(load.assigned < load.slots + LIMIT for load in now)
    for load in now:
        may_move = any(sample.moves < MAX_MOVES for sample in held_now[load.lease_id])
        if may_move and load.assigned > load.slots:
            assert not free
            assert load.assigned <= load.slots + LIMIT or not room


@given(crowds(), st.randoms())
def test_rebalance_does_not_depend_on_the_order_of_its_input(
    crowd: tuple[list[WorkerLoad], dict[str, list[Movable]]], source: random.Random
) -> None:
    loads, held = crowd
    moves = rebalance(loads, of(held), plateau=2, max_moves=MAX_MOVES, queue_limit=LIMIT)

    source.shuffle(loads)
    leases = list(held)
    source.shuffle(leases)
    for samples in held.values():
        source.shuffle(samples)
    again = {lease: held[lease] for lease in leases}
    assert rebalance(loads, of(again), plateau=2, max_moves=MAX_MOVES, queue_limit=LIMIT) == moves


def make_held(*samples: tuple[int, float, int], moves: int = 0) -> list[Movable]:
    return [make_movable(ordinal, moves=moves, expected=expected, kept=kept) for ordinal, expected, kept in samples]


def test_a_free_slot_takes_the_cheapest_longest_sample_of_the_longest_queue() -> None:
    loads = [make_load(0, 2, 4), make_load(1, 2, 3), make_load(2, 2, 1)]
    held = {"lease 0": make_held((0, 9.0, 5), (1, 3.0, 0), (2, 4.0, 0)), "lease 1": make_held((3, 9.0, 0))}

    moves = rebalance(loads, of(held), plateau=8, max_moves=1, queue_limit=4)

    assert moves == [Move(ordinal=2, source="lease 0", target="lease 2")]


def test_an_idle_worker_takes_the_excess_over_the_plateau() -> None:
    loads = [make_load(0, 8, 6), make_load(1, 8, 5), make_load(2, 8, 0)]
    held = {
        "lease 0": make_held(*((ordinal, 1.0, 1) for ordinal in range(6))),
        "lease 1": make_held(*((ordinal, 1.0, 1) for ordinal in range(6, 11))),
    }

    def count(plateau: dict[str, int] | int) -> Counter[str]:
        moves = rebalance(loads, of(held), plateau=plateau, max_moves=1, queue_limit=4)
        return Counter(move.source for move in moves)

    assert count(5) == {"lease 0": 1}  # max(6 - 5, 0); max(5 - 5, 0)
    assert count(6) == {}
    assert count({"lease 0": 6, "lease 1": 3}) == {"lease 1": 2}  # 5 - 3
    assert count({"lease 1": 4}) == {"lease 1": 1}  # the other's plateau is unknown
    # Plateau 1: (6, 5, 0) one by one from the most loaded, while the idle one gets less than that had:
    # (5, 5, 1), (4, 5, 2), (4, 4, 3); a fourth would give it as many as it left.
    assert count(1) == {"lease 0": 2, "lease 1": 1}
    assert rebalance(loads, of(held), plateau=1, max_moves=0, queue_limit=4) == []


@dataclass
class Loop:
    """A fleet that decodes one token per round and executing sample, in order of assignment."""

    source: random.Random
    slots: dict[str, int]
    left: dict[int, int]  # remaining tokens, by sample
    at: dict[int, str] = field(default_factory=dict)  # in order of assignment
    moves: Counter[int] = field(default_factory=Counter)
    trips: dict[int, list[str]] = field(default_factory=dict)

    def loads(self) -> list[WorkerLoad]:
        counts = Counter(self.at.values())
        return [WorkerLoad(lease_id=lease, slots=slots, assigned=counts[lease]) for lease, slots in self.slots.items()]

    def give(self, ordinal: int, lease: str) -> None:
        self.at.pop(ordinal, None)
        self.at[ordinal] = lease
        self.trips.setdefault(ordinal, []).append(lease)

    def round(self) -> None:
        waiting = [
            Waiting(ordinal=ordinal, group=GROUPS[ordinal % 5], expected_tokens=float(left))
            for ordinal, left in self.left.items()
            if ordinal not in self.at
        ]
        for ordinal, lease in dispatch(waiting, self.loads(), queue_limit=LIMIT):
            self.give(ordinal, lease)
        if len(self.at) == len(self.left):
            self.even_out()
        executing: Counter[str] = Counter()
        for ordinal, lease in list(self.at.items()):
            executing[lease] += 1
            if executing[lease] <= self.slots[lease]:
                self.left[ordinal] -= 1
                if not self.left[ordinal]:
                    del self.left[ordinal], self.at[ordinal]

    def even_out(self) -> None:
        held: dict[str, list[Movable]] = {lease: [] for lease in self.slots}
        for ordinal, lease in self.at.items():
            held[lease].append(
                make_movable(
                    ordinal,
                    moves=self.moves[ordinal],
                    expected=self.left[ordinal],
                    kept=len(self.trips[ordinal]),
                )
            )
        for move in rebalance(self.loads(), of(held), plateau=2, max_moves=MAX_MOVES, queue_limit=LIMIT):
            self.moves[move.ordinal] += 1
            self.give(move.ordinal, move.target)
        busy = {load.lease_id: load.assigned for load in self.loads()}
        assert not (0 in busy.values() and any(busy[lease] > slots + LIMIT for lease, slots in self.slots.items()))

    def churn(self) -> None:
        """A worker leaves or joins."""
        gone = self.source.choice(sorted(self.slots))
        if len(self.slots) > 1 and self.source.random() < 0.5:
            del self.slots[gone]
            self.at = {ordinal: lease for ordinal, lease in self.at.items() if lease != gone}
        else:
            self.slots[f"lease {len(self.trips)}-{self.source.random()}"] = self.source.randint(1, 9)


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 80), st.integers(0, 12))
def test_every_sample_finishes_with_few_moves_and_without_idle_slots(
    source: random.Random, workers: int, samples: int, churns: int
) -> None:
    slots = {f"lease {name}": source.randint(1, 9) for name in range(workers)}
    loop = Loop(source, slots, {ordinal: source.randint(1, 20) for ordinal in range(samples)})
    for _ in range(churns):
        loop.round()
        loop.churn()

    # From here the fleet is quiet. In every round either all slots work, or no sample that may move is queued: then
    # those queued behind others are out of moves, and each slot has at most LIMIT + 1 of them to do, one after another.
    total, capacity = sum(loop.left.values()), sum(loop.slots.values())
    bound = total // capacity + 1 + 20 * (LIMIT + 2)
    rounds = 0
    while loop.left:
        loop.round()
        rounds += 1
        assert rounds <= bound
    assert all(count <= MAX_MOVES for count in loop.moves.values())


def test_moved_samples_stay_until_the_load_changes() -> None:
    loop = Loop(random.Random(0), {"lease 0": 8, "lease 1": 8}, dict.fromkeys(range(10), 100))
    for ordinal in range(10):
        loop.give(ordinal, "lease 0")

    for _ in range(20):
        loop.round()

    # 2 queued samples fill free slots; then 8 and 2 execute, and no worker is idle.
    # The idle worker also took what the other executed beyond its plateau, until (5, 5): 2 + 3 moves.
    assert sum(loop.moves.values()) == 5
    assert Counter(loop.at.values()) == {"lease 0": 5, "lease 1": 5}


@pytest.mark.parametrize(
    ("lengths", "given_away"),
    [
        ([9, 8, 1], [1, 1, 0]),  # lease 0 lasts for 5 tokens: the short one
        ([9, 8, 7], [1, 1, 0]),  # no other has room
        ([9], [1]),
        ([4, 3], [0, 1]),
    ],
)
def test_long_samples_go_to_workers_that_last(lengths: list[int], given_away: list[int]) -> None:
    loads = [make_load(0, slots=2, tokens_left=5.0), make_load(1, slots=2)]
    waiting = [make_waiting(at, group=at, expected=float(length)) for at, length in enumerate(lengths)]

    decided = dispatch(waiting, loads, queue_limit=LIMIT)

    assert sorted(decided) == [(at, f"lease {name}") for at, name in enumerate(given_away)]


def test_a_cached_prefix_does_not_bring_a_long_sample_to_a_worker_that_ends() -> None:
    loads = [make_load(0, groups=[0], tokens_left=5.0), make_load(1, assigned=2)]

    assert dispatch([make_waiting(0, expected=9.0)], loads, queue_limit=LIMIT) == [(0, "lease 1")]
    assert dispatch([make_waiting(0, expected=4.0)], loads, queue_limit=LIMIT) == [(0, "lease 0")]


def test_of_workers_that_end_the_last_one_takes_a_long_sample() -> None:
    loads = [make_load(0, tokens_left=2.0), make_load(1, assigned=3, tokens_left=5.0)]

    assert dispatch([make_waiting(0, expected=9.0)], loads, queue_limit=LIMIT) == [(0, "lease 1")]


def test_no_sample_moves_to_a_worker_that_ends_before_it() -> None:
    held = of({"lease 1": [make_movable(0, moves=0, expected=9.0, kept=1)]})
    busy = make_load(1, slots=1, assigned=2)

    for tokens_left, moves in ((5.0, 0), (9.0, 1)):
        loads = [make_load(0, tokens_left=tokens_left), busy]
        assert len(rebalance(loads, held, plateau=8, max_moves=MAX_MOVES, queue_limit=LIMIT)) == moves
