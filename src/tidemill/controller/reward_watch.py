"""Shows every step to the reward guard, and carries out what it decides.

```
 step s ──▶ begin(s): gold is scored while step s + 1 is generated ──▶ collect: journalled, then judged ──▶ decide
```
Evidence of a step is collected after the next step, and before a checkpoint. What a run decides is a function of the
journal, so that a resumed run decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean

import msgspec

from tidemill.config.guard import GuardConfig
from tidemill.controller.collector import SampleCollector
from tidemill.controller.evaluation import draw
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext, StopRequested
from tidemill.core.errors import GuardStop, RollBack
from tidemill.core.evidence import Evidence, GuardDecision
from tidemill.core.protocols import Checkpoints, Guard
from tidemill.core.records import PolicyVersion, Prompt, SamplingParams, Trajectory
from tidemill.telemetry.events import GOLD, GUARD

CANARY = "canary"
"""Purpose of canaries' samples."""
MARGIN_S = 30.0
"""Added to the deadline of gold scores, for the wait around it."""


@dataclass(slots=True, kw_only=True)
class RewardWatch:
    """The guard of a run.

    Args:
        rollbacks: that were carried out before.
        canaries: prompts; empty for none.
    """

    guard: Guard
    config: GuardConfig
    rollbacks: int
    canaries: Sequence[Prompt]
    rollout: RolloutContext
    sampling: SamplingParams  # of training
    seed: int
    begun: int = field(default=0, init=False)  # step whose evidence is not collected yet; 0: none

    async def restore(self, checkpoints: Checkpoints) -> None:
        """Continue from what the journal has up to the newest checkpoint.

        Raises:
            RollBack: one was interrupted, or follows from the evidence.
            GuardStop: the run was stopped, and the action is the same.
        """
        ledger = self.rollout.ledger
        made = [decision for decision in ledger.decisions if decision.action == "rollback"]
        if len(made) > self.rollbacks:
            self._announce(made[-1])  # killed before it was carried out, perhaps before it was announced
            raise RollBack(made[-1].target)
        for step in sorted(ledger.evidence):
            if step not in ledger.batches:  # others are added when their batch is replayed
                self.guard.add(ledger.evidence[step])
        last = ledger.decisions[-1] if ledger.decisions else None
        if last is not None and not ledger.evidence and self.config.action == "rollback":
            if last.action == "stop":
                self._announce(last)
                raise GuardStop(_stop_text(last))
            if last.action == "pause":  # resumed with another action
                await self._carry_out(last, checkpoints)
        await self.decide(checkpoints)  # killed between a checkpoint and the decision

    def begin(self, step: int, samples: Sequence[tuple[Prompt, Trajectory]], metrics: Mapping[str, float]) -> None:
        """Start to score samples of a batch."""
        if step not in self.rollout.ledger.evidence:
            self.guard.begin(step, samples, metrics)
        self.begun = step

    async def measure_canaries(self, step: int, version: PolicyVersion, training: SampleCollector | None) -> None:
        """Generate canaries if they are due after `step`; they are evidence of the next step."""
        ledger, every = self.rollout.ledger, self.config.canary_every
        first = not ledger.evidence and not self.begun
        if not (every and self.canaries and (first or step % every == 0)) or step + 1 in ledger.evidence:
            return
        rollout = replace(
            self.rollout, ledger=Ledger(None), frozen_scoring=None, observers=(), phase="evaluation", window_s=math.inf
        )
        async with AsyncExitStack() as pause:
            if training is not None:
                await pause.enter_async_context(training.paused())
            drawn = await draw(
                version=version,
                prompts=self.canaries,
                rollout=rollout,
                sampling=self.sampling,
                seed=self.seed,
                purpose=CANARY,
                samples_per_prompt=1,
            )
        self.guard.measure([(prompt, sample) for prompt, (sample,) in zip(self.canaries, drawn, strict=True)])

    async def collect(self) -> None:
        """Journal and judge the evidence of the step begun last."""
        if not self.begun:
            return
        ledger, stop = self.rollout.ledger, self.rollout.stop
        evidence = ledger.evidence.get(self.begun)
        if evidence is None:
            waiting = self.rollout.wait_for(
                self.guard.evidence(at_once=stop.is_set()),
                awaited=f"gold scores of step {self.begun}",
                look_at="the gold reward",
                deadline_s=self.config.gold_timeout_s + MARGIN_S,
            )
            try:
                lost = "they are counted as missing"
                evidence = await self.rollout.unless_stopped(waiting, awaited="gold scores", lost=lost)
            except StopRequested:
                evidence = await self.guard.evidence(at_once=True)
            await ledger.record_evidence(evidence)
        self.begun = 0
        self.guard.add(evidence)
        self.rollout.telemetry.event(GOLD, **_gold_fields(evidence))

    async def decide(self, checkpoints: Checkpoints) -> None:
        """Carry out a decision that follows from the evidence.

        Raises:
            RollBack: return to an earlier checkpoint.
            GuardStop: the run pauses or stops.
        """
        if self.guard.decision is not None:
            await self._carry_out(self.guard.decision, checkpoints)

    async def _carry_out(self, found: GuardDecision, checkpoints: Checkpoints) -> None:
        ledger, action, target = self.rollout.ledger, self.config.action, 0
        assert action != "off"
        if action == "rollback":
            target = max((step for step in await checkpoints.steps() if step < found.onset), default=0)
        again = action == "rollback" and self.rollbacks > 0
        decision = msgspec.structs.replace(
            found,
            number=len(ledger.decisions) + 1,
            action="stop" if again else action,
            target=0 if again else target,
            forgets=action != "rollback" or again or bool(self.config.amend.reward_weights),
        )
        await ledger.record_decision(decision)
        self.guard.forget()
        self._announce(decision)
        if decision.action == "rollback":
            raise RollBack(target)
        if decision.action != "warn":
            self.begun = 0  # evidence after the decision would mean that the run went on
            raise GuardStop(_stop_text(decision))

    def _announce(self, decision: GuardDecision) -> None:
        """Readers of the events count a decision once, however often it is announced."""
        self.rollout.telemetry.event(GUARD, **msgspec.structs.asdict(decision))


def _gold_fields(evidence: Evidence) -> dict[str, object]:
    pairs = evidence.pairs
    fields: dict[str, object] = {"step": evidence.step, "proxy_mean": evidence.proxy_mean, "pairs": len(pairs)}
    if pairs:
        fields["gold_mean"] = fmean(pair.gold for pair in pairs)
        fields["pair_proxy_mean"] = fmean(pair.proxy for pair in pairs)
    if evidence.missing:
        fields |= {"missing": evidence.missing, "why_missing": evidence.why_missing}
    return fields | {"witnesses": evidence.witnesses}


def _stop_text(decision: GuardDecision) -> str:
    if decision.action == "pause":
        hint = "continue it as it is with the same command, or go back with --guard.action rollback"
    else:
        hint = "correct the reward (disputed.jsonl has samples), or continue as it is with --guard.action warn"
    what = "paused the run" if decision.action == "pause" else "stopped the run again, after a rollback,"
    return f"the guard {what} at step {decision.step}. {decision.reason}\n  {hint}"
