"""Watches the reward of a run: scores some samples with gold in the background, and tests whether it still follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev

import msgspec

from tidemill.config.guard import GuardConfig
from tidemill.core.errors import describe_error
from tidemill.core.evidence import Evidence, GoldPair, GuardDecision
from tidemill.core.protocols import Scorer
from tidemill.core.records import Prompt, Trajectory
from tidemill.guard.detectors import HackTest
from tidemill.guard.evidence import chosen_for_gold
from tidemill.guard.witnesses import witnesses

FIRST = 4
"""In the first step as many times more samples get a gold score: later steps are compared with it."""

Samples = Sequence[tuple[Prompt, Trajectory]]


class RewardGuard:
    """Implements `core.protocols.Guard`.

    Args:
        gold: its score is compared with the reward of a sample; None: only people give verdicts.
        verdicts: returns new verdicts of people.
        keep_disputed: gets the pairs since the onset, before a decision is journalled.
    """

    def __init__(
        self,
        config: GuardConfig,
        gold: Scorer | None,
        *,
        verdicts: Callable[[], Sequence[GoldPair]] = tuple,
        keep_disputed: Callable[[Sequence[GoldPair]], object] = lambda _: None,
    ) -> None:
        self._config, self._gold, self._verdicts, self._keep_disputed = config, gold, verdicts, keep_disputed
        self._test, self._known = HackTest(), 0
        self._decision: GuardDecision | None = None
        self._pairs: list[GoldPair] = []
        self._canaries: list[asyncio.Task[GoldPair | str]] = []
        self._asked: list[asyncio.Task[GoldPair | str]] = []
        self._begun: Evidence | None = None
        self._until_s = 0.0

    def add(self, evidence: Evidence) -> None:
        self._known += 1
        self._pairs += evidence.pairs
        alarm = self._test.add(evidence)
        if alarm is not None and self._decision is None:
            if self._config.action in ("pause", "rollback"):
                self._keep_disputed([pair for pair in self._pairs if pair.step >= alarm.onset])
            self._decision = GuardDecision(
                step=evidence.step,
                onset=alarm.onset,
                test=alarm.test,
                reason=alarm.reason,
                proxy=alarm.proxy,
                gold=alarm.gold,
            )

    @property
    def decision(self) -> GuardDecision | None:
        return self._decision

    @property
    def earliest_onset(self) -> int:
        # A checkpoint may be written between an alarm and the decision.
        later = self._test.earliest_onset
        return later if self._decision is None else min(later, self._decision.onset)

    def forget(self) -> None:
        self._test, self._known, self._decision, self._pairs = HackTest(), 0, None, []

    def begin(self, step: int, samples: Samples, metrics: Mapping[str, float]) -> None:
        scored = [(prompt, sample) for prompt, sample in samples if sample.reward is not None and sample.reward.valid]
        rewards = [sample.reward.value for _, sample in scored if sample.reward is not None]
        self._begun = Evidence(
            step=step,
            proxy_mean=fmean(rewards) if rewards else 0.0,
            proxy_spread=pstdev(rewards) if rewards else 0.0,
            samples=len(rewards),
            pairs=tuple(self._verdicts()),
            witnesses=witnesses(scored, metrics),
        )
        most = self._config.gold_most if self._known else FIRST * self._config.gold_most
        share = self._config.gold_share if self._known else min(1.0, FIRST * self._config.gold_share)
        chosen = list[int]()
        if self._gold is not None:
            chosen = chosen_for_gold([sample.sample_id for _, sample in scored], share=share, most=most)
        self._asked = [*self._canaries, *(self._ask(step, *scored[index]) for index in chosen)]
        self._canaries = []
        self._until_s = asyncio.get_running_loop().time() + self._config.gold_timeout_s

    def measure(self, canaries: Samples) -> None:
        if self._gold is not None:
            self._canaries += [self._ask(0, *each, canary=True) for each in canaries]

    async def evidence(self, *, at_once: bool = False) -> Evidence:
        assert self._begun is not None, "no step was begun"
        if self._asked:
            left_s = 0.0 if at_once else max(0.0, self._until_s - asyncio.get_running_loop().time())
            await asyncio.wait(self._asked, timeout=left_s)
        pairs, reasons = [], list[str]()
        for task in self._asked:
            if not task.done():
                task.cancel()
                late = f"no score within {self._config.gold_timeout_s:g} s"
                reasons.append("the run was told to stop" if at_once else late)
            elif isinstance(found := task.result(), str):
                reasons.append(found)
            else:
                pairs.append(msgspec.structs.replace(found, step=self._begun.step))
        self._asked = []
        return msgspec.structs.replace(
            self._begun,
            pairs=(*self._begun.pairs, *pairs),
            missing=len(reasons),
            why_missing=reasons[0] if reasons else "",
        )

    async def close(self) -> None:
        """Cancel what is being scored, and close the gold scorer."""
        tasks = [*self._asked, *self._canaries]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._gold is not None:
            await self._gold.close()

    def _ask(
        self, step: int, prompt: Prompt, sample: Trajectory, *, canary: bool = False
    ) -> asyncio.Task[GoldPair | str]:
        return asyncio.create_task(self._score(step, prompt, sample, canary=canary), name="gold score")

    async def _score(self, step: int, prompt: Prompt, sample: Trajectory, *, canary: bool) -> GoldPair | str:
        """Both scores; or why there is none."""
        assert self._gold is not None
        proxy = sample.reward
        if proxy is None or not proxy.valid:
            return "the reward is invalid"
        try:
            # An environment's own reward of the episode would replace gold.
            gold = await self._gold.score(prompt, msgspec.structs.replace(sample, outcome=None))
        except Exception as error:  # noqa: BLE001 - a run does not depend on its second opinion
            return describe_error(error)
        if not gold.valid:
            return gold.reason
        return GoldPair(
            prompt_id=sample.sample_id.prompt_id,
            index=sample.sample_id.index,
            step=step,
            proxy=proxy.value,
            gold=gold.value,
            source="canary" if canary else "batch",
        )
