"""Which worker generates which sample. Pure: the state of the fleet goes in, a decision comes out.

`dispatch` hands out what waits, `rebalance` evens out what was handed out. Select-instance and the two rules of
continuous balance are RLBoost's (arXiv 2510.19225); longest expected first and prompt affinity are ours.

RLHFuse (arXiv 2409.13221) gathers what is left of a batch when about a fifth of it remains, because a few long samples
leave every worker nearly empty. What is freed first here is the trainer's own engine: the device then computes scores
and gradients undisturbed.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tidemill.core.records import Record

GroupKey: TypeAlias = tuple[str, str, int]
"""`SampleId.group`."""

Place: TypeAlias = tuple[float, int, str]
"""Orders the places that samples may take, over all workers; no two are equal."""

SLACK = 8
"""A worker that held a group's prefix before may get one sample per so many slots (at least one) more than is even."""


class Load(Record):
    """One worker that can take samples now, as the ledger sees it."""

    lease_id: str
    slots: int  # samples it decodes at once
    assigned: int  # samples given to it and not finished; executing = min(assigned, slots), the rest is queued
    groups: frozenset[GroupKey] = frozenset()  # groups whose prefix it holds


class Waiting(Record):
    """A sample that nobody generates."""

    ordinal: int  # canonical place in the batch
    group: GroupKey
    expected_tokens: float  # still to come
    lost_lease: str = ""  # where its last attempt ended early: another worker is preferred


class Movable(Record):
    """A sample queued or executing at a worker."""

    ordinal: int
    group: GroupKey
    moves: int  # times it was moved to even out the load
    expected_tokens: float  # still to come
    kept_tokens: int  # prefix that would be recomputed


class Move(Record):
    """Take a sample from one worker and give it to another."""

    ordinal: int
    source: str
    target: str


class Router(Protocol):
    """The two decisions: what a module of policies has, such as this one."""

    def dispatch(
        self, waiting: Sequence[Waiting], loads: Sequence[Load], *, queue_limit: int
    ) -> list[tuple[int, str]]: ...

    def rebalance(
        self,
        loads: Sequence[Load],
        held: Callable[[str], Sequence[Movable]],
        *,
        plateau: Mapping[str, int] | int,
        max_moves: int,
        queue_limit: int,
    ) -> list[Move]: ...


@dataclass(slots=True, eq=False)
class _Worker:
    """A `Load` whose count changes while a decision is made."""

    load: Load
    slots: int
    assigned: int

    @property
    def free(self) -> int:
        return max(self.slots - self.assigned, 0)

    @property
    def queued(self) -> int:
        return max(self.assigned - self.slots, 0)

    @property
    def executing(self) -> int:
        return min(self.assigned, self.slots)

    def place(self, credit: int = 0) -> Place:
        """The place its next sample takes, if it had `credit` fewer.

        Free slots come first and are filled evenly, then the shortest queues; the larger of two equal workers wins.
        """
        assigned, slots = self.assigned - credit, self.slots
        fullness = assigned / slots if assigned < slots else 1.0 + assigned - slots
        return (fullness, -slots, self.load.lease_id)


def dispatch(waiting: Sequence[Waiting], loads: Sequence[Load], *, queue_limit: int) -> list[tuple[int, str]]:
    """Who takes which waiting sample: (ordinal, lease) pairs, longest expected first.

    Free slots are filled before anything is queued, and no worker gets more than `queue_limit` queued. How many each
    worker gets is even by its share of slots, then by its queue; within that a sample goes where its group's prefix is.

    Cost: O(workers + samples log samples).
    """
    workers = [_Worker(load, load.slots, load.assigned) for load in loads if load.slots > 0]
    free = sum(worker.free for worker in workers)
    room = free + sum(max(queue_limit - worker.queued, 0) for worker in workers)
    chosen = heapq.nsmallest(room, waiting, key=lambda sample: (-sample.expected_tokens, sample.ordinal))
    homes = _homes(chosen, workers)
    decided: list[tuple[int, str]] = []
    for limit, samples in ((0, chosen[:free]), (queue_limit, chosen[free:])):
        if samples:
            decided += _Tier(workers, homes, queue_limit=limit, samples=len(samples)).fill(samples)
    return decided


def _homes(samples: Iterable[Waiting], workers: Sequence[_Worker]) -> defaultdict[GroupKey, list[_Worker]]:
    """For each group that waits, who holds its prefix; the least loaded last."""
    wanted = {sample.group for sample in samples}
    homes: defaultdict[GroupKey, list[_Worker]] = defaultdict(list)
    for worker in workers:
        for group in wanted & worker.load.groups:
            homes[group].append(worker)
    for holders in homes.values():
        holders.sort(key=_Worker.place, reverse=True)
    return homes


class _Tier:
    """Samples that go to free slots (queue limit 0), or those that are queued."""

    def __init__(
        self, workers: Sequence[_Worker], homes: defaultdict[GroupKey, list[_Worker]], *, queue_limit: int, samples: int
    ) -> None:
        self._limit, self._homes = queue_limit, homes
        self._stacks: dict[GroupKey, list[_Worker]] = {}  # homes that still have room, the preferred one last
        self._heap = [(worker.place(), worker) for worker in workers if self._has_room(worker)]
        heapq.heapify(self._heap)
        self._idle = sum(not worker.assigned for _, worker in self._heap)
        self._even = self._last_place(samples)

    def _has_room(self, worker: _Worker) -> bool:
        return worker.assigned < worker.slots + self._limit

    def _last_place(self, samples: int) -> Place:
        """The last place taken when so many samples are spread by load alone: what is before it is a worker's share."""
        heap = [(place, _Worker(worker.load, worker.slots, worker.assigned)) for place, worker in self._heap]
        last: Place = (-1.0, 0, "")
        for _ in range(samples):
            last, worker = heap[0]
            worker.assigned += 1
            if self._has_room(worker):
                heapq.heapreplace(heap, (worker.place(), worker))
            else:
                heapq.heappop(heap)
        return last

    def fill(self, samples: Sequence[Waiting]) -> list[tuple[int, str]]:
        """Place every sample; there is room for all of them."""
        decided = []
        for left, sample in zip(range(len(samples) - 1, -1, -1), samples, strict=True):
            worker = self._home(sample, left)
            if worker is None:
                worker = self._least(sample.lost_lease)
                self._homes[sample.group].append(worker)
                self._stack(sample.group).append(worker)
            self._idle -= not worker.assigned
            worker.assigned += 1
            decided.append((sample.ordinal, worker.load.lease_id))
        return decided

    def _stack(self, group: GroupKey) -> list[_Worker]:
        if group not in self._stacks:
            self._stacks[group] = list(self._homes.get(group, ()))
        return self._stacks[group]

    def _home(self, sample: Waiting, left: int) -> _Worker | None:
        """A worker that holds the group's prefix and has not had its share; one that held it before may get a bit more.

        None also when another worker would stay idle for it: `left` samples remain after this one.
        """
        stack = self._stack(sample.group)
        while stack:
            worker = stack[-1]
            credit = 0
            if sample.group in worker.load.groups:
                credit = max(1, worker.slots // SLACK) if worker.free else 1
            if self._has_room(worker) and worker.place(credit) <= self._even:
                leaves_idle = worker.assigned and left < self._idle
                return None if leaves_idle or worker.load.lease_id == sample.lost_lease else worker
            stack.pop()
        return None

    def _least(self, avoided: str) -> _Worker:
        """The worker with the first place, another than the avoided one if any has room."""
        first = self._first()
        if first.load.lease_id != avoided or len(self._heap) == 1:
            return first
        entry = heapq.heappop(self._heap)
        try:
            return self._first() if self._prune() else first
        finally:
            heapq.heappush(self._heap, entry)

    def _first(self) -> _Worker:
        self._prune()
        return self._heap[0][1]

    def _prune(self) -> bool:
        """Bring the top of the heap up to date; whether there is one."""
        while self._heap:
            place, worker = self._heap[0]
            if not self._has_room(worker):
                heapq.heappop(self._heap)
            elif place != worker.place():
                heapq.heapreplace(self._heap, (worker.place(), worker))
            else:
                return True
        return False


def rebalance(
    loads: Sequence[Load],
    held: Callable[[str], Sequence[Movable]],
    *,
    plateau: Mapping[str, int] | int,
    max_moves: int,
    queue_limit: int,
) -> list[Move]:
    """Even out what was handed out; for when nothing waits. A second call after the moves were made asks for none.

    - A worker with a free slot takes from the longest queue. Whatever is queued beyond `queue_limit` goes to a queue
      that has room.
    - A worker that executes nothing takes what the most loaded one executes beyond its plateau batch size (one number,
      or by lease; a worker without one gives nothing), no further than until both execute the same.

    Chosen are the samples with the fewest tokens to recompute, of those the longest expected. None is moved more than
    `max_moves` times, and none to a worker that would then have as much as the one it leaves had.

    Args:
        held: what a worker has, by its lease; asked only of those that may give something.
    """
    workers = [_Worker(load, load.slots, load.assigned) for load in loads if load.slots > 0]
    idle = [worker for worker in workers if not worker.assigned]
    givable = _Givable(held, max_moves)

    def shortens_queue(source: _Worker, target: _Worker) -> bool:
        beyond = source.queued > queue_limit > target.queued
        return source.queued > 0 and (target.free > 0 or beyond)

    def beyond_plateau(worker: _Worker) -> int:
        size = plateau if isinstance(plateau, int) else plateau.get(worker.load.lease_id, worker.slots)
        return worker.executing - size

    def fills_idle(source: _Worker, target: _Worker) -> bool:
        return beyond_plateau(source) > 0 and target.free > 0 and target.assigned + 1 < source.executing

    moves = _shift(workers, workers, givable, rank=lambda worker: worker.queued, helps=shortens_queue)
    if idle:
        busy = [worker for worker in workers if 0 < worker.load.assigned >= worker.assigned]  # and was given nothing
        moves += _shift(busy, idle, givable, rank=beyond_plateau, helps=fills_idle)
    return moves


class _Givable:
    """What each worker may give away, sorted when it is first asked for."""

    def __init__(self, held: Callable[[str], Sequence[Movable]], max_moves: int) -> None:
        self._held, self._max_moves = held, max_moves
        self._sorted: dict[str, list[Movable]] = {}

    def of(self, worker: _Worker) -> list[Movable]:
        """The samples it may give, the one to give first last."""
        lease_id = worker.load.lease_id
        if lease_id not in self._sorted:
            self._sorted[lease_id] = sorted(
                (sample for sample in self._held(lease_id) if sample.moves < self._max_moves),
                key=lambda sample: (-sample.kept_tokens, sample.expected_tokens, -sample.ordinal),
            )
        return self._sorted[lease_id]


def _shift(
    sources: Sequence[_Worker],
    targets: Sequence[_Worker],
    givable: _Givable,
    *,
    rank: Callable[[_Worker], int],
    helps: Callable[[_Worker, _Worker], bool],
) -> list[Move]:
    """One sample at a time from the highest-ranked source to the least loaded target, while that helps."""
    giving = [(-ranked, worker.load.lease_id, worker) for worker in sources if (ranked := rank(worker)) > 0]
    taking = [(worker.place(), worker) for worker in targets] if giving else []
    heapq.heapify(giving)
    heapq.heapify(taking)
    moves: list[Move] = []
    while giving and taking:
        source, target = giving[0][2], taking[0][1]
        if not helps(source, target) or not (candidates := givable.of(source)):  # nor later: targets only get fuller
            heapq.heappop(giving)
            continue
        moves.append(Move(ordinal=candidates.pop().ordinal, source=source.load.lease_id, target=target.load.lease_id))
        source.assigned -= 1
        target.assigned += 1
        heapq.heapreplace(giving, (-rank(source), source.load.lease_id, source))
        heapq.heapreplace(taking, (target.place(), target))
    return moves


def tail_begins(*, unfinished: int, samples: int, fraction: float) -> bool:
    """Whether no more than this share of the samples in flight is unfinished."""
    return 0 < unfinished <= fraction * samples


def select_tail_workers(
    loads: Sequence[Load], *, unfinished: int, plateau: int, last: Collection[str]
) -> frozenset[str]:
    """The fewest workers that can decode so many samples at once; all of them when that takes all.

    Those with the most samples, so that the fewest move; each takes as many as it has or as still pay.

    Args:
        loads: workers that take samples now.
        plateau: the batch size from which a worker gets no faster.
        last: workers that are taken only if the others do not suffice.
    """
    chosen: list[str] = []
    for load in sorted(loads, key=lambda load: (load.lease_id in last, -load.assigned, load.lease_id)):
        if unfinished <= 0:
            break
        chosen.append(load.lease_id)
        unfinished -= max(load.assigned, min(load.slots, plateau))
    return frozenset(chosen)
