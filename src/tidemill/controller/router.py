"""Assigns samples to workers. Pure functions of the fleet's load.

`dispatch` assigns waiting samples, `rebalance` moves assigned ones. Select-instance and the two rules of continuous
balance are RLBoost's (arXiv 2510.19225); longest-expected-first and prompt affinity are additions.

`select_tail_workers` consolidates the tail of a batch on few workers, as RLHFuse (arXiv 2409.13221) does when about a
fifth of a batch remains. Here the trainer's own engine is freed first, so that its device computes scores and gradients
alone.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

from tidemill.core.records import Record

GroupKey: TypeAlias = tuple[str, str, int]
"""`SampleId.group`."""

Place: TypeAlias = tuple[float, int, str]
"""Sort key of a slot or queue place, unique over all workers."""

SLACK = 8
"""A worker may exceed its fair share by one sample per 8 slots (at least one), to reuse a group's prefix cache."""


class WorkerLoad(Record):
    """Load of one worker that takes samples."""

    lease_id: str
    slots: int  # samples it decodes concurrently
    assigned: int  # unfinished samples; min(assigned, slots) are executing, the others queued
    groups: frozenset[GroupKey] = frozenset()  # groups whose prefix it has cached
    tokens_left: float = math.inf  # that it generates of one sample until the known end of its lease


class Waiting(Record):
    """A sample that is not assigned."""

    ordinal: int  # canonical place in the batch
    group: GroupKey
    expected_tokens: float  # remaining
    lost_lease: str = ""  # lease of its last attempt: other workers are preferred
    kept_lease: str = ""  # lease of its last turn, whose worker may have its keys and values: preferred


class Movable(Record):
    """A sample queued or executing at a worker."""

    ordinal: int
    group: GroupKey
    moves: int  # times it was moved before
    expected_tokens: float  # remaining
    kept_tokens: int  # prefix that a move recomputes


class Move(Record):
    """Move a sample from one worker to another."""

    ordinal: int
    source: str
    target: str


class Router(Protocol):
    """The interface of a routing policy; this module implements it."""

    def dispatch(
        self, waiting: Sequence[Waiting], loads: Sequence[WorkerLoad], *, queue_limit: int
    ) -> list[tuple[int, str]]: ...

    def rebalance(
        self,
        loads: Sequence[WorkerLoad],
        held: Callable[[str], Sequence[Movable]],
        *,
        plateau: Mapping[str, int] | int,
        max_moves: int,
        queue_limit: int,
    ) -> list[Move]: ...


@dataclass(slots=True, eq=False)
class _Worker:
    """A `WorkerLoad` with a running count of assigned samples."""

    load: WorkerLoad
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
        """The place of its next sample, as if it had `credit` fewer.

        Free slots come first and are filled evenly, then the shortest queues; on a tie, the larger worker.
        """
        assigned, slots = self.assigned - credit, self.slots
        fullness = assigned / slots if assigned < slots else 1.0 + assigned - slots
        return (fullness, -slots, self.load.lease_id)


def dispatch(waiting: Sequence[Waiting], loads: Sequence[WorkerLoad], *, queue_limit: int) -> list[tuple[int, str]]:
    """Assign waiting samples, longest expected first; returns (ordinal, lease) pairs.

    Free slots are filled before queues, and no queue exceeds `queue_limit`. Each worker's share is proportional to its
    slots; within that, a sample goes to a worker that has its group's prefix cached. A worker whose lease ends before a
    sample is expected to finish takes it only if no other has room.

    Cost: O(workers + samples log samples).
    """
    workers = [_Worker(load, load.slots, load.assigned) for load in loads if load.slots > 0]
    free = sum(worker.free for worker in workers)
    room = free + sum(max(queue_limit - worker.queued, 0) for worker in workers)
    chosen = heapq.nsmallest(room, waiting, key=lambda sample: (-sample.expected_tokens, sample.ordinal))
    holders = _prefix_holders(chosen, workers)
    decided = _returns(chosen, workers)
    placed = {ordinal for ordinal, _ in decided}
    chosen, free = [each for each in chosen if each.ordinal not in placed], free - len(placed)
    for limit, samples in ((0, chosen[:free]), (queue_limit, chosen[free:])):
        if samples:
            decided += _Tier(workers, holders, queue_limit=limit, samples=len(samples)).fill(samples)
    return decided


def _returns(samples: Sequence[Waiting], workers: Sequence[_Worker]) -> list[tuple[int, str]]:
    """Samples that go back to the worker of their last turn, because it has a free slot."""
    by_lease = {worker.load.lease_id: worker for worker in workers} if any(s.kept_lease for s in samples) else {}
    decided = []
    for sample in samples:
        worker = by_lease.get(sample.kept_lease)
        if worker is not None and worker.free:
            worker.assigned += 1
            decided.append((sample.ordinal, sample.kept_lease))
    return decided


def _prefix_holders(samples: Iterable[Waiting], workers: Sequence[_Worker]) -> defaultdict[GroupKey, list[_Worker]]:
    """Workers that have a waiting group's prefix cached, by group; the least loaded last."""
    wanted = {sample.group for sample in samples}
    holders: defaultdict[GroupKey, list[_Worker]] = defaultdict(list)
    for worker in workers:
        for group in wanted & worker.load.groups:
            holders[group].append(worker)
    for group_holders in holders.values():
        group_holders.sort(key=_Worker.place, reverse=True)
    return holders


class _Tier:
    """Assignment to free slots (queue limit 0), or to queues."""

    def __init__(
        self,
        workers: Sequence[_Worker],
        holders: defaultdict[GroupKey, list[_Worker]],
        *,
        queue_limit: int,
        samples: int,
    ) -> None:
        self._limit, self._holders = queue_limit, holders
        self._candidates: dict[GroupKey, list[_Worker]] = {}  # with the prefix, preferred last
        self._heap = [(worker.place(), worker) for worker in workers if self._has_room(worker)]
        heapq.heapify(self._heap)
        self._idle = sum(not worker.assigned for _, worker in self._heap)
        self._fair = self._last_place(samples)
        self._ending = [  # those that last longest first
            (-worker.load.tokens_left, place, worker)
            for place, worker in self._heap
            if worker.load.tokens_left < math.inf
        ]
        if self._ending:
            heapq.heapify(self._ending)
            self._heap = [entry for entry in self._heap if entry[1].load.tokens_left == math.inf]
            heapq.heapify(self._heap)

    def _has_room(self, worker: _Worker) -> bool:
        return worker.assigned < worker.slots + self._limit

    def _last_place(self, samples: int) -> Place:
        """The last place filled when the samples are spread by load alone; a worker's fair share ends there."""
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
        """Assign every sample; the workers must have room for all of them."""
        decided = []
        for left, sample in zip(range(len(samples) - 1, -1, -1), samples, strict=True):
            self._admit(sample.expected_tokens)
            worker = self._with_prefix(sample, left)
            if worker is None:
                worker = self._least_loaded(sample.lost_lease)
                self._holders[sample.group].append(worker)
                self._candidates_for(sample.group).append(worker)
            self._idle -= not worker.assigned
            worker.assigned += 1
            decided.append((sample.ordinal, worker.load.lease_id))
        return decided

    def _admit(self, tokens: float) -> None:
        """Let workers take samples that have enough time for `tokens`, or the most time if no other has room.

        Samples come longest first, so none of these workers has to be excluded again.
        """
        while self._ending and (self._ending[0][0] <= -tokens or not self._prune()):
            _, place, worker = heapq.heappop(self._ending)
            heapq.heappush(self._heap, (place, worker))

    def _candidates_for(self, group: GroupKey) -> list[_Worker]:
        if group not in self._candidates:
            self._candidates[group] = list(self._holders.get(group, ()))
        return self._candidates[group]

    def _with_prefix(self, sample: Waiting, left: int) -> _Worker | None:
        """A worker within its fair share that has the group's prefix; one that had it before may exceed the share.

        None if another worker would then stay idle, `left` samples remaining after this one.
        """
        candidates = self._candidates_for(sample.group)
        while candidates:
            worker = candidates[-1]
            credit = 0
            if sample.group in worker.load.groups:
                credit = max(1, worker.slots // SLACK) if worker.free else 1
            lasts = worker.load.tokens_left >= sample.expected_tokens or not self._ending
            if lasts and self._has_room(worker) and worker.place(credit) <= self._fair:
                leaves_idle = worker.assigned and left < self._idle
                return None if leaves_idle or worker.load.lease_id == sample.lost_lease else worker
            candidates.pop()
        return None

    def _least_loaded(self, avoided: str) -> _Worker:
        """The worker with the first place; the avoided one only if no other has room."""
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
        """Update the top of the heap; returns False if the heap is empty."""
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
    loads: Sequence[WorkerLoad],
    held: Callable[[str], Sequence[Movable]],
    *,
    plateau: Mapping[str, int] | int,
    max_moves: int,
    queue_limit: int,
) -> list[Move]:
    """Moves that balance the load while no sample is waiting. Once they are made, a second call returns none.

    - A worker with a free slot takes from the longest queue. Samples queued beyond `queue_limit` move to a queue that
      has room.
    - An idle worker takes from the most loaded worker what that executes beyond its plateau batch size, until both
      execute equally many samples. The plateau is one number for all workers, or a number by lease; samples of a worker
      without a number do not move.

    Samples with the fewest tokens to recompute move first, among them the longest expected. None moves more than
    `max_moves` times, and none to a worker that would then be as loaded as its source was, or whose lease ends before
    the sample is expected to finish.

    Args:
        held: returns a lease's samples; called only for workers that may give some.
    """
    workers = [_Worker(load, load.slots, load.assigned) for load in loads if load.slots > 0]
    idle = [worker for worker in workers if not worker.assigned]

    @cache
    def givable(lease_id: str) -> list[Movable]:
        """A worker's samples that may move; the first to move is last."""
        return sorted(
            (sample for sample in held(lease_id) if sample.moves < max_moves),
            key=lambda sample: (-sample.kept_tokens, sample.expected_tokens, -sample.ordinal),
        )

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
        busy = [
            worker for worker in workers if 0 < worker.load.assigned >= worker.assigned
        ]  # not a target of the moves above
        moves += _shift(busy, idle, givable, rank=beyond_plateau, helps=fills_idle)
    return moves


def _shift(
    sources: Sequence[_Worker],
    targets: Sequence[_Worker],
    givable: Callable[[str], list[Movable]],
    *,
    rank: Callable[[_Worker], int],
    helps: Callable[[_Worker, _Worker], bool],
) -> list[Move]:
    """Move samples one by one from the highest-ranked source to the least loaded target, while `helps` holds."""
    giving = [(-ranked, worker.load.lease_id, worker) for worker in sources if (ranked := rank(worker)) > 0]
    taking = [(worker.place(), worker) for worker in targets] if giving else []
    heapq.heapify(giving)
    heapq.heapify(taking)
    moves: list[Move] = []
    while giving and taking:
        source, target = giving[0][2], taking[0][1]
        if not helps(source, target) or not (candidates := givable(source.load.lease_id)):  # targets only get fuller
            heapq.heappop(giving)
            continue
        if candidates[-1].expected_tokens > target.load.tokens_left:
            heapq.heappop(taking)
            continue
        moves.append(Move(ordinal=candidates.pop().ordinal, source=source.load.lease_id, target=target.load.lease_id))
        source.assigned -= 1
        target.assigned += 1
        heapq.heapreplace(giving, (-rank(source), source.load.lease_id, source))
        heapq.heapreplace(taking, (target.place(), target))
    return moves


def is_tail(*, unfinished: int, samples: int, fraction: float) -> bool:
    """Whether at most this fraction of the samples in flight is unfinished, and at least one."""
    return 0 < unfinished <= fraction * samples


def select_tail_workers(
    loads: Sequence[WorkerLoad], *, unfinished: int, plateau: int, last: Collection[str]
) -> frozenset[str]:
    """The fewest workers that can decode `unfinished` samples concurrently.

    Workers with the most samples are chosen first, so that the fewest samples move.

    Args:
        loads: workers that take samples.
        plateau: batch size beyond which a worker's throughput does not grow; a worker takes more only if it has more.
        last: leases that are chosen only if the others do not suffice.
    """
    chosen: list[str] = []
    for load in sorted(loads, key=lambda load: (load.lease_id in last, -load.assigned, load.lease_id)):
        if unfinished <= 0:
            break
        chosen.append(load.lease_id)
        unfinished -= max(load.assigned, min(load.slots, plateau))
    return frozenset(chosen)
