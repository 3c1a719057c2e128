"""A guard that decides at given steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tests.doubles.samples import number
from tidemill.core.evidence import Evidence, GoldPair, GuardDecision
from tidemill.core.records import Prompt, Trajectory


class FakeGuard:
    """Implements `core.protocols.Guard`.

    Args:
        alarms: onset by the step whose evidence raises the alarm.
        gold_s: time of the gold scores of a step.
    """

    def __init__(self, alarms: Mapping[int, int], *, gold_s: float = 0.5) -> None:
        self.alarms, self._gold_s = dict(alarms), gold_s
        self.seen: list[Evidence] = []
        self.begun: list[int] = []
        self._asked: Evidence | None = None
        self._canaries: list[GoldPair] = []
        self._decision: GuardDecision | None = None

    def add(self, evidence: Evidence) -> None:
        assert not self.seen or self.seen[-1].step < evidence.step
        self.seen.append(evidence)
        onset = self.alarms.get(evidence.step)
        if onset is not None and self._decision is None:
            self._decision = GuardDecision(
                step=evidence.step, onset=onset, test="gap", reason="The reward rose. Gold fell."
            )

    @property
    def decision(self) -> GuardDecision | None:
        return self._decision

    @property
    def earliest_onset(self) -> int:
        return min(self.alarms.values(), default=1 << 30)

    def begin(self, step: int, samples: Sequence[tuple[Prompt, Trajectory]], metrics: Mapping[str, float]) -> None:
        self.begun.append(step)
        pairs = (*self._canaries, *(_pair(step, sample) for _, sample in samples[:2]))
        self._canaries = []
        self._asked = Evidence(
            step=step, proxy_mean=float(len(samples)), proxy_spread=1.0, samples=len(samples), pairs=pairs
        )

    def measure(self, canaries: Sequence[tuple[Prompt, Trajectory]]) -> None:
        self._canaries += [_pair(0, sample) for _, sample in canaries]

    async def evidence(self, *, at_once: bool = False) -> Evidence:
        assert self._asked is not None
        await asyncio.sleep(0.0 if at_once else self._gold_s)
        return self._asked

    def forget(self) -> None:
        self.seen, self._decision = [], None

    async def close(self) -> None:
        pass


def _pair(step: int, sample: Trajectory) -> GoldPair:
    identity, digest = sample.sample_id, sample.versions[-1].version.digest if sample.versions else ""
    gold = number("gold", identity.key, digest) % 2
    return GoldPair(prompt_id=identity.prompt_id, index=identity.index, step=step, proxy=1.0, gold=float(gold))
