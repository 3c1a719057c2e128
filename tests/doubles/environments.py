"""Environments whose answers are a function of the episode, with calls that may be slow, parallel or unrepeatable."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from tests.doubles.samples import VOCABULARY, number
from tidemill.controller.turns import AgentLimits
from tidemill.core.protocols import CallLog
from tidemill.core.records import (
    Call,
    Episode,
    EpisodeEnd,
    Observation,
    SampleId,
    pack_tokens,
    unpack_tokens,
)

LIMITS = AgentLimits(context_tokens=200, turn_tokens=5)


class FakeEnvironments:
    """Implements `Environments`. An answer depends on everything that the policy saw and wrote.

    Args:
        executed: how often each call was made, over all sessions.
    """

    def __init__(self, *, executed: Counter[str] | None = None, slow_s: float = 1.0, most_turns: int = 4) -> None:
        self.executed = Counter[str]() if executed is None else executed
        self.slow_s, self.most_turns = slow_s, most_turns
        self.seen: dict[tuple[SampleId, int], Episode] = {}  # the last, by sample and turn
        self.forgotten: list[SampleId] = []
        self.busy = self.busiest = self.answered = self.counted = 0

    async def act(self, episode: Episode, calls: CallLog) -> Observation:
        turn = len(episode.turns) - 1
        key = number(episode.sample_id.key, turn, episode.token_ids)
        self.seen[episode.sample_id, turn] = episode
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        self.answered += 1
        try:
            made = await asyncio.gather(*(self._call(episode, calls, turn, index) for index in range(key % 3)))
            await asyncio.sleep(self.slow_s * (key % 5) / 4)
        finally:
            self.busy -= 1
        if None in made:
            return Observation(end="fault", reason="a call was interrupted")
        end: EpisodeEnd = "done" if key % self.most_turns == 0 else "turns" if turn + 1 == self.most_turns else ""
        added = [number(key, at) % VOCABULARY for at in range(key % 6)]
        branch = not end and key % 4 == 1
        context = [*unpack_tokens(episode.prompt.token_ids), *added, 1] if branch else added
        return Observation(
            text=str(added),
            token_ids=b"" if end else pack_tokens(context),
            new_branch=branch,
            reward=float(key % 2),
            end=end,
            state_key=str(key % 3),
            calls=tuple(call for call in made if call is not None),
        )

    async def _call(self, episode: Episode, calls: CallLog, turn: int, index: int) -> Call | None:
        """Every second call must not be repeated; None if it was interrupted."""
        sample, repeatable = episode.sample_id, index % 2 == 0
        again = f"-{episode.restarts}" if episode.restarts else ""
        call_id = f"{sample.purpose}/{sample.key}{again}/{turn}/{index}"
        if index in episode.finished:
            assert episode.finished[index].call_id == call_id, "the result of another call"
            return episode.finished[index]
        if index in episode.started:
            return None
        if not repeatable:
            await calls.started(index)
        await self.execute(sample, call_id, repeatable=repeatable)
        call = Call(call_id=call_id, name="tool", arguments="{}", result=str(number(call_id, "result")))
        await calls.ended(index, call)
        return call

    async def execute(self, sample: SampleId, call_id: str, *, repeatable: bool) -> None:
        self.executed[call_id] += 1
        # Evaluations are not journalled: they are repeated.
        assert repeatable or sample.purpose != "train" or self.executed[call_id] == 1, f"{call_id} was made twice"
        await asyncio.sleep(self.slow_s * (number(call_id) % 4) / 4)

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        self.forgotten += sample_ids

    def take_counts(self) -> dict[str, int]:
        new, self.counted = self.answered - self.counted, self.answered
        return {"calls": new}

    async def close(self) -> None: ...
