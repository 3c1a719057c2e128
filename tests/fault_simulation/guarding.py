"""A guard that decides at planned steps, gold that is slow, hangs or fails, and what must hold of both."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tests.fault_simulation.invariants import require
from tests.fault_simulation.journal_reading import DurableState
from tests.fault_simulation.scenario import GuardPlan
from tidemill.config.schema import RunSpec
from tidemill.controller.entries import AnyEntry, Decided, Judged
from tidemill.controller.reward_watch import CANARY
from tidemill.core.evidence import Evidence, GuardDecision
from tidemill.core.records import PolicyVersion, Prompt, Reward, Trajectory
from tidemill.guard.reward_guard import RewardGuard
from tidemill.sim.simulated_trainer import SimulatedDisk

NO_ALARM = 1 << 30


@dataclass
class Disk(SimulatedDisk):
    """Durable state: also of rollbacks.

    Args:
        keep_last: checkpoints, besides a pinned one; 0: all.
    """

    rollbacks: int = 0  # carried out
    keep_last: int = 0

    def keep(self, step: int, version: PolicyVersion, pinned: int | None) -> None:
        """Write a checkpoint, and delete those that need not be kept."""
        self.checkpoints[step] = version
        if self.keep_last:
            past = sorted(each for each in self.checkpoints if each <= step)
            kept = set(past[-self.keep_last :])
            if pinned is not None:
                kept.add(max((each for each in past if each <= pinned), default=step))
            self.checkpoints = {each: known for each, known in self.checkpoints.items() if each in kept}


class PlannedTest:
    """Raises an alarm at planned steps. Its reason is a digest of all evidence.

    Args:
        alarms: (step whose evidence raises it, onset).
    """

    def __init__(self, alarms: Collection[tuple[int, int]]) -> None:
        self._alarms = dict(alarms)
        self._seen, self._newest = hashlib.blake2b(digest_size=8), 0
        self.decision: GuardDecision | None = None

    def add(self, evidence: Evidence) -> None:
        require(evidence.step > self._newest, f"the guard sees step {evidence.step} after {self._newest}")
        self._newest = evidence.step
        self._seen.update(msgspec.msgpack.encode(evidence))
        onset = self._alarms.get(evidence.step)
        if onset is not None and self.decision is None:
            self.decision = GuardDecision(
                step=evidence.step, onset=onset, test="gap", reason=f"Evidence {self._seen.hexdigest()}."
            )

    @property
    def earliest_onset(self) -> int:
        if self.decision is not None:
            return self.decision.onset
        return min((onset for step, onset in self._alarms.items() if step > self._newest), default=NO_ALARM)


class PlannedGuard:
    """Implements `core.protocols.Guard`: the real evidence, and planned decisions."""

    def __init__(self, spec: RunSpec, gold: SimulatedGold, test: PlannedTest) -> None:
        self._measured = RewardGuard(spec.guard, gold)
        self._test = test

    def add(self, evidence: Evidence) -> None:
        self._test.add(evidence)

    @property
    def decision(self) -> GuardDecision | None:
        return self._test.decision

    @property
    def earliest_onset(self) -> int:
        return self._test.earliest_onset

    def begin(self, step: int, samples: Sequence[tuple[Prompt, Trajectory]], metrics: Mapping[str, float]) -> None:
        self._measured.begin(step, samples, metrics)

    def measure(self, canaries: Sequence[tuple[Prompt, Trajectory]]) -> None:
        self._measured.measure(canaries)

    async def evidence(self, *, at_once: bool = False) -> Evidence:
        return await self._measured.evidence(at_once=at_once)

    def forget(self) -> None:
        self._test = PlannedTest(())

    async def close(self) -> None:
        await self._measured.close()


class SimulatedGold:
    """Scores slowly; some scores hang or fail."""

    def __init__(self, plan: GuardPlan, invariants: GuardInvariants, rng: random.Random) -> None:
        self._plan, self._invariants, self._rng = plan, invariants, rng

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        fate, seconds = self._rng.random(), self._rng.uniform(0, self._plan.gold_s)
        await asyncio.sleep(1e9 if fate < self._plan.hangs else seconds)
        if fate > 1 - self._plan.fails:
            raise RuntimeError("the judge is on fire")
        gold = float(sum(trajectory.completion_ids) % 3)
        self._invariants.gives(trajectory, gold)
        return Reward(value=gold)

    async def close(self) -> None:
        pass


class GuardInvariants:
    """Checks what the journal says of evidence and decisions over all lives of a run."""

    def __init__(self, plan: GuardPlan, spec: RunSpec) -> None:
        self.plan = plan
        self.saved: set[int] = set()  # all checkpoints of the run's history, also those deleted since
        self._spec = spec
        self._given: set[tuple[str, str, int, float, float]] = set()  # scores
        self._checked = 0  # decisions

    def gives(self, trajectory: Trajectory, gold: float) -> None:
        sample_id, reward = trajectory.sample_id, trajectory.reward
        source = "canary" if sample_id.purpose == CANARY else "batch"
        assert reward is not None
        self._given.add((source, sample_id.prompt_id, sample_id.index, reward.value, gold))

    def restored(self, step: int) -> None:
        self.saved = {each for each in self.saved if each <= step}

    def test(self, *, again: bool) -> PlannedTest:
        return PlannedTest(self.plan.again if again else self.plan.alarms)

    def take(self, entry: AnyEntry, durable: DurableState) -> None:
        """An entry is durable, after those that `durable` has."""
        if isinstance(entry, Judged):
            self._check_evidence(entry.evidence, durable)
        elif isinstance(entry, Decided):
            self._check_decision(entry.decision, durable)

    def _check_evidence(self, evidence: Evidence, durable: DurableState) -> None:
        step, name = evidence.step, f"evidence of step {evidence.step}"
        newest = max(durable.evidence, default=step - 1)
        require(step == newest + 1, f"{name} follows that of step {newest}")
        for pair in evidence.pairs:
            said = pair.source, pair.prompt_id, pair.index, pair.proxy, pair.gold
            require(said in self._given, f"{name} has a score that nobody gave: {pair}")
            require(pair.step == step, f"{name} has a score of step {pair.step}")
        every, missing = self._spec.guard.canary_every, evidence.missing
        if every and (step - 1) % every == 0:
            canaries = min(self._spec.guard.canaries, self._spec.eval.prompts)
            have = missing + sum(pair.source == "canary" for pair in evidence.pairs)
            require(have >= canaries, f"{name} has {have} canaries, not {canaries}")

    def undecided(self, durable: DurableState) -> GuardDecision | None:
        """What an undisturbed guard decides."""
        test = self.test(again=durable.rollbacks > 0)
        for step in sorted(durable.evidence):
            test.add(durable.evidence[step])
        return test.decision

    def _check_decision(self, said: GuardDecision, durable: DurableState) -> None:
        again, found, number = durable.rollbacks > 0, self.undecided(durable), len(durable.decisions) + 1
        require(found is not None, f"the guard decided without a reason: {said}")
        assert found is not None
        right = msgspec.structs.replace(
            found,
            number=number,
            action="stop" if again else "rollback",
            target=said.target,
            forgets=again or bool(self._spec.guard.amend.reward_weights),
        )
        require(said == right, f"the guard decided {said}, not {right}")
        if number > self._checked:  # later, there are other checkpoints
            self._checked = number
            target = 0 if again else max((step for step in self.saved if step < found.onset), default=0)
            require(said.target == target, f"the run returns to step {said.target}, not {target}")

    def carried_out(self, target: int, durable: DurableState, rollbacks: int) -> None:
        """The run returns to a checkpoint."""
        decision = durable.decisions[-1] if durable.decisions else None
        right = decision is not None and (decision.action, decision.target) == ("rollback", target)
        require(right, f"the run returns to {target} after {decision}")
        require(durable.rollbacks == rollbacks + 1, f"{durable.rollbacks} decisions, {rollbacks} rollbacks before")
        self.restored(target)

    def stopped(self, durable: DurableState) -> None:
        """The guard ended the run."""
        actions = [decision.action for decision in durable.decisions]
        require(actions == ["rollback", "stop"], f"the guard ended the run after {actions}")

    def finished(self, durable: DurableState, rollbacks: int) -> None:
        require(not self.plan.again, "the run did not stop")
        actions = [decision.action for decision in durable.decisions]
        require((actions, rollbacks) == (["rollback"], 1), f"the run ended after {actions}, {rollbacks} rollbacks")
        missed = self.undecided(durable)
        require(missed is None, f"the run ended without {missed}")
        (decision,) = durable.decisions
        first = min(durable.evidence, default=NO_ALARM)
        begin = decision.target + 1 if decision.forgets else 1
        require(first <= begin, f"the evidence begins with step {first}, not {begin}")
        have, right = sorted(durable.evidence), list(range(first, self._spec.trainer.steps + 1))
        require(have == right, f"there is evidence of steps {have}, not {right}")
