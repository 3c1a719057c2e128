"""Policies of other systems for comparison: RLBoost (arXiv 2510.19225) and veRL's fixed partition of a batch.

RLBoost: the samples of a prompt form one request, which goes to the worker with the fewest pending requests, regardless
of lengths and cached prompts. A request that moves is truncated to the shortest of its unfinished samples.

veRL: each data-parallel rank gets an equal number of prompts before generation; ranks that finish early stay idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from tidemill.controller.fleet import Fleet
from tidemill.controller.length_model import LengthModel
from tidemill.controller.router import GroupKey, Movable, Move, Waiting, WorkerLoad
from tidemill.core.records import ITEM_BYTES, GenerateRequest, PolicyVersion, SampleId, TokenDelta, count
from tidemill.sim.costs import EngineCosts, ProfiledEngine
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.simulation import ComponentFactories
from tidemill.sim.workload import Completions

T = TypeVar("T")

MOST_PENDING = 1
"""Theta: most groups queued at a worker; the public code assigns none to an engine with a queue."""
UNLIMITED = 10**6

Moved = Literal["unfinished", "all", "samples anew", "requests anew"]
"""How a group continues elsewhere. "unfinished": from the shortest unfinished sample. "all": from the shortest of all
samples, regenerating finished ones, as in the public code. Without migration: "samples anew" restarts unfinished
samples, "requests anew" all samples of unfinished requests."""


def rlboost_fleet(group_size: int) -> dict[str, Any]:
    """[fleet] keys with the constants of the public code."""
    return {
        "size": "adaptive",
        "seed_window_s": 150.0,
        "window_gain": 3.0,
        "window_floor_s": 5.0,
        "queue_limit": MOST_PENDING * group_size,
        "max_moves": UNLIMITED,
    }


def rlboost_components(group_size: int, *, moved: Moved = "unfinished") -> ComponentFactories:
    """Components for one simulation, whose engines share state."""
    router = GroupRouter(group_size=group_size, most_pending=MOST_PENDING)
    return ComponentFactories(
        fleet=partial(Fleet, router=router, lengths=UnknownLengths()),
        engine=partial(GroupEngine, moved=moved, asked={}),
        final_report=moved in ("unfinished", "all"),
    )


class UnknownLengths(LengthModel):
    """Equal estimates for all samples, so that waiting samples keep their order."""

    def expected_remaining(
        self, prompt_id: str, prompt_tokens: int, have: int, limit: int, siblings: Sequence[int] = ()
    ) -> float:
        return 1.0


@dataclass(slots=True, eq=False)
class _Place:
    """A mutable copy of a `WorkerLoad`; a request without slots is pending."""

    load: WorkerLoad
    assigned: int
    group_size: int

    @property
    def pending(self) -> int:
        return -(-max(self.assigned - self.load.slots, 0) // self.group_size)

    @property
    def executing(self) -> int:
        return min(self.assigned, self.load.slots)

    @property
    def rank(self) -> tuple[int, float, str]:
        return (self.pending, self.assigned / self.load.slots, self.load.lease_id)


class GroupRouter:
    """Implements `controller.router.Router` for whole groups (RLBoost's requests).

    Args:
        most_pending: a worker with this many pending requests gets no other (theta).
    """

    def __init__(self, *, group_size: int, most_pending: int) -> None:
        self._group_size, self._most_pending = group_size, most_pending

    def dispatch(
        self, waiting: Sequence[Waiting], loads: Sequence[WorkerLoad], *, queue_limit: int
    ) -> list[tuple[int, str]]:
        """Select-instance: assign each group to the worker with the fewest pending, then the lowest load."""
        places = self._places(loads)
        decided: list[tuple[int, str]] = []
        for samples in _groups(waiting, lambda sample: sample.group).values():
            place = min(places, key=lambda place: place.rank, default=None)
            if place is None or place.pending >= self._most_pending:
                break
            place.assigned += len(samples)
            decided += [(sample.ordinal, place.load.lease_id) for sample in samples]
        return decided

    def rebalance(
        self,
        loads: Sequence[WorkerLoad],
        held: Callable[[str], Sequence[Movable]],
        *,
        plateau: Mapping[str, int] | int,
        max_moves: int,
        queue_limit: int,
    ) -> list[Move]:
        """Continuous balance, one decision per call.

        If a worker has no pending request and others do, it gets one from the longest queue. A worker without samples
        gets the excess over the plateau of the most loaded one.
        """
        places = self._places(loads)
        if len(places) < 2:
            return []
        target, source = min(places, key=lambda place: place.rank), max(places, key=lambda place: place.rank)
        if not target.pending and source.pending > (target.executing == target.load.slots):
            return self._moves(source, target, held, self._group_size, max_moves)
        source = max(places, key=lambda place: (place.executing, place.load.lease_id))
        size = plateau if isinstance(plateau, int) else plateau.get(source.load.lease_id, source.load.slots)
        if not target.assigned and source.executing > size:
            return self._moves(source, target, held, source.executing - size, max_moves)
        return []

    def _places(self, loads: Sequence[WorkerLoad]) -> list[_Place]:
        return [_Place(load, load.assigned, self._group_size) for load in loads if load.slots > 0]

    def _moves(
        self,
        source: _Place,
        target: _Place,
        held: Callable[[str], Sequence[Movable]],
        samples: int,
        max_moves: int,
    ) -> list[Move]:
        """Whole groups with about `samples` samples: the newest, which have the fewest tokens."""
        groups = _groups(held(source.load.lease_id), lambda sample: sample.group).values()
        chosen: list[Movable] = []
        for group in sorted(groups, key=lambda group: (sum(one.kept_tokens for one in group), -group[0].ordinal)):
            if len(chosen) >= samples:
                break
            if all(one.moves < max_moves for one in group):
                chosen += group
        return [Move(ordinal=one.ordinal, source=source.load.lease_id, target=target.load.lease_id) for one in chosen]


def _groups(members: Iterable[T], group: Callable[[T], GroupKey]) -> dict[GroupKey, list[T]]:
    """Group items, ordered by their first member."""
    found: defaultdict[GroupKey, list[T]] = defaultdict(list)
    for member in members:
        found[group(member)].append(member)
    return found


Asked = dict[GroupKey, dict[SampleId, GenerateRequest]]
"""The last requests to engines, by group."""


class GroupEngine(SimulatedEngine):
    """An engine whose requests are whole groups; a moved group continues according to `moved`. Truncated tokens are
    regenerated; regenerated samples that had already finished are not reported.

    Args:
        asked: shared by all engines of a simulation.
    """

    def __init__(
        self, costs: EngineCosts, completions: Completions, *, now_s: float, moved: Moved, asked: Asked
    ) -> None:
        super().__init__(costs, completions, now_s=now_s)
        self._moved, self._asked = moved, asked
        self._cut: dict[SampleId, int] = {}  # kept prefix tokens of a moved sample
        self._again: set[SampleId] = set()  # finished elsewhere

    def submit(self, requests: Iterable[GenerateRequest], now_s: float) -> None:
        together: list[GenerateRequest] = []
        for group, members in _groups(requests, lambda request: request.sample_id.group).items():
            if self._moved in ("all", "requests anew"):
                members += self._ended(group, members)
            shortest = min(count(member.prefix_ids) for member in members)
            self._cut |= {member.sample_id: shortest for member in members}
            together += members
        super().submit(together, now_s)

    def abort(self, sample_ids: Sequence[SampleId], now_s: float) -> None:
        groups = {sample_id.group for sample_id in sample_ids}
        if self._moved == "requests anew":  # recalled samples report their tokens
            for group in groups:
                self._asked.pop(group, None)
        super().abort([*sample_ids, *(one for one in self._again if one.group in groups)], now_s)

    def flush(self, now_s: float) -> list[TokenDelta]:
        return self._reported(super().flush(now_s))

    def take_ended(self) -> list[TokenDelta]:
        return self._reported(super().take_ended())

    def _ended(self, group: GroupKey, members: Iterable[GenerateRequest]) -> list[GenerateRequest]:
        """Samples of a known group that are no longer requested."""
        asked = {member.sample_id: member for member in members}
        ended = [request for one, request in self._asked.get(group, {}).items() if one not in asked]
        if self._moved == "all":
            lengths = [min(self._completions.length(each.sample_id), each.sampling.max_new_tokens) for each in ended]
            ended = [
                msgspec.structs.replace(request, prefix_ids=bytes(tokens * ITEM_BYTES))
                for request, tokens in zip(ended, lengths, strict=True)
            ]
        self._again |= {request.sample_id for request in ended}
        self._asked[group] = asked | {request.sample_id: request for request in ended}
        return ended

    def _reported(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        return [delta for delta in deltas if delta.sample_id not in self._again]

    def _kept(self, request: GenerateRequest) -> int:
        return self._cut.pop(request.sample_id, super()._kept(request))


def chunked_components() -> ComponentFactories:
    """Components of a run with a fixed partition of the batch in prompt order, without length estimates."""
    return ComponentFactories(fleet=partial(Fleet, lengths=UnknownLengths()), engine=ChunkedEngines)


class ChunkedEngines(SimulatedEngine):
    """Several engines as one worker. Groups submitted together are partitioned in order; later groups go to the engine
    with the fewest samples.

    Args:
        costs: of all engines, a `ProfiledEngine`.
    """

    def __init__(self, costs: EngineCosts, completions: Completions, *, now_s: float) -> None:
        super().__init__(costs, completions, now_s=now_s)
        assert isinstance(costs, ProfiledEngine), "needs the profile of a single engine"
        one = msgspec.structs.replace(costs, engines=1)
        self._engines = [SimulatedEngine(one, completions, now_s=now_s) for _ in range(costs.engines)]
        self._homes: dict[GroupKey, SimulatedEngine] = {}  # engine by group

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self._engines)

    @property
    def queued(self) -> int:
        return sum(engine.queued for engine in self._engines)

    @property
    def tokens_per_s(self) -> float:
        return sum(engine.tokens_per_s for engine in self._engines)

    def next_change_s(self) -> float:
        return min(engine.next_change_s() for engine in self._engines)

    def submit(self, requests: Iterable[GenerateRequest], now_s: float) -> None:
        requests = list(requests)
        if not self.running + self.queued:
            self._homes.clear()
        new = list(dict.fromkeys(request.sample_id.group for request in requests if not self._home(request.sample_id)))
        engines = sorted(self._engines, key=lambda engine: engine.running + engine.queued)
        for place, group in enumerate(new):
            self._homes[group] = engines[place * len(engines) // len(new)]
        for engine in self._engines:
            engine.submit((request for request in requests if self._home(request.sample_id) is engine), now_s)
        self._gather()

    def abort(self, sample_ids: Sequence[SampleId], now_s: float) -> None:
        for engine in self._engines:
            engine.abort([sample_id for sample_id in sample_ids if self._home(sample_id) is engine], now_s)
        self._gather()

    def load(self, version: PolicyVersion, *, computes_with: PolicyVersion, swap_s: float, now_s: float) -> None:
        for engine in self._engines:
            engine.load(version, computes_with=computes_with, swap_s=swap_s, now_s=now_s)
        self.version, self.computes_with = version, computes_with
        self._gather()

    def pause(self, now_s: float) -> None:
        for engine in self._engines:
            engine.pause(now_s)

    def resume(self, now_s: float) -> None:
        for engine in self._engines:
            engine.resume(now_s)

    def flush(self, now_s: float) -> list[TokenDelta]:
        return [delta for engine in self._engines for delta in engine.flush(now_s)]

    def advance(self, now_s: float) -> None:
        for engine in self._engines:
            engine.advance(now_s)
        self._gather()

    def _home(self, sample_id: SampleId) -> SimulatedEngine | None:
        return self._homes.get(sample_id.group)

    def _gather(self) -> None:
        """Collect deltas and counters of all engines."""
        self._deltas += [delta for engine in self._engines for delta in engine.take_ended()]
        self.generated = sum(engine.generated for engine in self._engines)
        self.prefilled = sum(engine.prefilled for engine in self._engines)
        self.reused = sum(engine.reused for engine in self._engines)
        self.put_back = sum(engine.put_back for engine in self._engines)
        self.recomputed = sum(engine.recomputed for engine in self._engines)
