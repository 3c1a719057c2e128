"""Engines and environments of agents that report what they do to the invariants."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence

from tests.doubles.costs import ConstantEngine
from tests.fault_simulation.episodes import FAULTS
from tests.fault_simulation.invariants import Draws, Invariants
from tidemill.core.protocols import CallLog
from tidemill.core.records import (
    ITEM_BYTES,
    Call,
    Episode,
    Finish,
    GenerateRequest,
    LogprobBuffer,
    Observation,
    SampleId,
    TokenBuffer,
)
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.workload import BlankCompletions

DEADLINE_S = 20.0
"""Seconds after which an environment without an answer counts as dead."""


class TurnEngine(SimulatedEngine):
    """Generates turns of agents."""

    def __init__(self, costs: ConstantEngine, invariants: Invariants, *, now_s: float) -> None:
        super().__init__(costs, BlankCompletions(lambda sample_id: 0), now_s=now_s)
        assert invariants.episodes is not None
        self._invariants, self._episodes = invariants, invariants.episodes
        self._draws: dict[SampleId, Draws] = {}

    def submit(self, requests: Iterable[GenerateRequest], now_s: float) -> None:
        requests = list(requests)
        for request in requests:
            self._draws[request.sample_id] = self._invariants.requested(request)
        super().submit(requests, now_s)

    def _ending(self, request: GenerateRequest) -> tuple[int, Finish]:
        start = request.turn_start
        length, finish = self._episodes.ending(
            request.sample_id, request.branch, context_of(request), request.limit - start
        )
        return start + length, finish

    def _drawn(self, request: GenerateRequest, start: int, end: int) -> tuple[TokenBuffer, LogprobBuffer]:
        context, first = context_of(request), request.turn_start
        self._invariants.draws(self._draws[request.sample_id], request, context, start, end)
        return self._episodes.drawn(
            request.sample_id, request.branch, context, self.computes_with.digest, start - first, end - first
        )


def context_of(request: GenerateRequest) -> TokenBuffer:
    """What the policy sees at the start of the requested turn."""
    return request.prompt_ids + request.prefix_ids[: request.turn_start * ITEM_BYTES]


class SimulatedEnvironments:
    """Implements `core.protocols.Environments` with environments that are slow, dead or late, and calls that die.

    The first sample of a group has no faults, because a run ends if no sample gets a valid reward.

    Args:
        errors: raised by a planned share of the turns; none in a life that must finish.
    """

    def __init__(self, invariants: Invariants, rng: random.Random, errors: Sequence[BaseException]) -> None:
        assert invariants.episodes is not None
        self._invariants, self._episodes, self._rng = invariants, invariants.episodes, rng
        self._plan, self._errors = invariants.episodes.plan, errors
        self.open: set[SampleId] = set()  # asked for an answer, and not forgotten

    async def act(self, episode: Episode, calls: CallLog) -> Observation:
        self._invariants.acts(episode)
        self.open.add(episode.sample_id)
        rng, plan, turn = self._rng, self._plan, len(episode.turns) - 1
        answer = self._episodes.answer(episode.sample_id, turn, episode.prompt.token_ids, episode.token_ids)
        seconds, late_s = rng.uniform(0, plan.slow_s), rng.uniform(0, 5) if rng.random() < plan.late else None
        dead = rng.random() < plan.dead and episode.sample_id.index > 0
        raises = rng.random() < plan.raises
        making = [
            asyncio.create_task(self._call(episode, turn, index, call, calls))
            for index, call in enumerate(answer.calls)
        ]
        try:
            made = await asyncio.gather(*making)
            await asyncio.sleep(DEADLINE_S if dead else seconds)
        except asyncio.CancelledError:
            if late_s is None:
                raise
            await asyncio.sleep(late_s)
            return answer
        finally:
            for task in making:  # one of them failed
                task.cancel()
        if raises and self._errors:
            raise rng.choice(self._errors)
        if dead or not all(made):
            self._invariants.gives_fault(episode)
            return Observation(end="fault", reason=FAULTS[0 if dead else 1])
        return answer

    async def _call(self, episode: Episode, turn: int, index: int, call: Call, calls: CallLog) -> bool:
        """Make a call; False if it was interrupted and must not be repeated."""
        repeatable = index % 2 == 0
        if index in episode.finished:
            self._invariants.reuses(episode, call, episode.finished[index])
            return True
        if index in episode.started:
            return False
        if not repeatable:
            await calls.started(index)
        seconds = self._rng.uniform(0, self._plan.slow_s)
        while self._rng.random() < self._plan.dies and episode.sample_id.index > 0:
            self._invariants.executes(episode, turn, index, repeatable=repeatable)
            await asyncio.sleep(seconds)
            if not repeatable:
                return False
        self._invariants.executes(episode, turn, index, repeatable=repeatable)
        await asyncio.sleep(seconds)
        await calls.ended(index, call)
        return True

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        self.open -= set(sample_ids)

    def take_counts(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        pass
