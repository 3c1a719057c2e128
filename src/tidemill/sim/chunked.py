"""Engines side by side, each with a part of the batch to itself: how frameworks generate that keep to one place.

veRL's generation on the training GPUs, for one, gives every data-parallel rank as many prompts before anything is
generated. What is drawn then decides who is done first, and nobody helps the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from tidemill.controller.fleet import Fleet
from tidemill.controller.router import GroupKey
from tidemill.core.records import GenerateRequest, PolicyVersion, SampleId, TokenDelta
from tidemill.sim.completions import Completions
from tidemill.sim.costs import EngineCosts
from tidemill.sim.engine import SimulatedEngine
from tidemill.sim.profiled import ProfiledEngine
from tidemill.sim.rlboost import UnknownLengths
from tidemill.sim.run import Twins


def chunked_twins() -> Twins:
    """Of a run whose engines have their parts beforehand, in the prompts' order: nobody asks how long they may be."""
    return Twins(fleet=partial(Fleet, lengths=UnknownLengths()), engine=ChunkedEngines)


class ChunkedEngines(SimulatedEngine):
    """Several engines as one worker. Whole groups that come together are dealt out in order, as many to each; those
    that come later, to whoever has the least.

    Args:
        costs: of all of them, a `ProfiledEngine`.
    """

    def __init__(self, costs: EngineCosts, completions: Completions, *, now_s: float) -> None:
        super().__init__(costs, completions, now_s=now_s)
        assert isinstance(costs, ProfiledEngine), "only engines side by side can be told apart"
        one = msgspec.structs.replace(costs, engines=1)
        self._engines = [SimulatedEngine(one, completions, now_s=now_s) for _ in range(costs.engines)]
        self._homes: dict[GroupKey, SimulatedEngine] = {}  # who has a group of the batch

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
        """What the engines have to tell, and what they have done so far."""
        self._deltas += [delta for engine in self._engines for delta in engine.take_ended()]
        self.generated = sum(engine.generated for engine in self._engines)
        self.prefilled = sum(engine.prefilled for engine in self._engines)
        self.reused = sum(engine.reused for engine in self._engines)
        self.put_back = sum(engine.put_back for engine in self._engines)
        self.recomputed = sum(engine.recomputed for engine in self._engines)
