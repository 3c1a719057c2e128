"""Runs the scenario of a seed and returns its outcome."""

from __future__ import annotations

import hashlib
import math
from typing import Any
from unittest.mock import patch

import msgspec

from tests.doubles.completions import EncodedCompletions
from tests.fault_simulation.components import reward_of
from tests.fault_simulation.episodes import Episodes
from tests.fault_simulation.guarding import Disk, GuardInvariants
from tests.fault_simulation.invariants import PROMPT, Invariants, Violation, require
from tests.fault_simulation.scenario import LifePlan, Scenario, draw
from tests.fault_simulation.tail_invariants import TailInvariants
from tests.fault_simulation.training_invariants import TrainingInvariants
from tests.fault_simulation.world import World, prompts_of
from tidemill.core.errors import GuardStop, RollBack
from tidemill.core.records import Record
from tidemill.sim.virtual_time import Deadlock, run_virtual
from tidemill.weights import delta

Line = tuple[int, float, str, dict[str, Any]]
"""Event log lines: life, time, event."""


class Outcome(Record):
    """The outcome of a seed."""

    seed: int
    violation: str  # empty if all invariants hold
    lives: int
    looks: int  # number of checks of all samples in flight
    virtual_s: float
    events: int
    digest: str  # of the event log


class Simulation:
    """All lives of one scenario; `log` contains their events."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.log: list[Line] = []
        spec = scenario.spec
        completions = EncodedCompletions(scenario.longest)
        most_held = scenario.engine.slots + spec.fleet.queue_limit if scenario.elastic else math.inf
        episodes = Episodes(scenario.agent) if scenario.agent else None
        self.invariants = Invariants(
            spec, completions, most_held=most_held, patience_s=scenario.patience_s, episodes=episodes
        )
        if spec.schedule.tail == "batching":
            self.invariants.tail = TailInvariants(spec, None if episodes else completions.length, PROMPT)
        source = prompts_of(scenario, spec)
        size, steps = spec.batch.prompts, 4 * spec.trainer.steps + 8
        positions = {
            (epoch, prompt.prompt_id): (step - 1) * size + at
            for step in range(1, steps + 1)
            for at, (epoch, prompt) in enumerate(source.train_batch(step))
        }
        self.training = TrainingInvariants(self.invariants, positions, reward_of)
        self._completions = completions
        self._disk = Disk()
        if scenario.guard is not None:
            self.invariants.guarding = GuardInvariants(scenario.guard, spec)
            self._disk.keep_last = scenario.guard.keep_last
        self._virtual_s, self._lives = 0.0, 0

    def run(self) -> Outcome:
        violation = ""
        try:
            with patch.object(delta, "CHUNK", self.scenario.part_elements):
                self._live_all()
        except Violation as found:
            violation = str(found)
        except Deadlock:
            violation = "deadlock: all tasks wait and no timer is set"
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            violation = f"the controller raised {error!r}"
        return Outcome(
            seed=self.scenario.seed,
            violation=violation,
            lives=self._lives,
            looks=self.invariants.looks,
            virtual_s=self._virtual_s,
            events=len(self.log),
            digest=hashlib.blake2b(msgspec.json.encode(self.log), digest_size=16).hexdigest(),
        )

    def _live_all(self) -> None:
        *early, last = self.scenario.lives
        steps = self.scenario.early_steps or self.scenario.spec.trainer.steps
        for life in early:
            if self._live(life, steps):
                if steps == self.scenario.spec.trainer.steps:
                    return
                steps = self.scenario.spec.trainer.steps
        if self._live(last, self.scenario.spec.trainer.steps):
            return
        raise Violation("the last life did not finish the run")

    def _live(self, life: LifePlan, steps: int) -> bool:
        """Whether the run ended, after `steps` steps."""
        if life.loses_checkpoint and self._disk.checkpoints:
            del self._disk.checkpoints[max(self._disk.checkpoints)]
        while True:
            finished, world = self._play(life, steps)
            if not isinstance(world.decided, RollBack):
                break
            if not self._roll_back(world.decided.step, life.rollback_cut):
                return False
            life = after_rollback(life, world)
        if isinstance(world.decided, GuardStop):
            self._stop_again()
        return finished or world.decided is not None

    def _roll_back(self, target: int, cut: str) -> bool:
        """Return to a checkpoint; False if power is cut."""
        guarding, disk = self.invariants.guarding, self._disk
        assert guarding is not None
        guarding.carried_out(target, self.invariants.durable, disk.rollbacks)
        if cut != "before":
            disk.checkpoints = {step: version for step, version in disk.checkpoints.items() if step <= target}
        if not cut:
            disk.rollbacks += 1
            self.training.returns(target)
        return not cut

    def _stop_again(self) -> None:
        """A run that the guard stopped stops again."""
        guarding = self.invariants.guarding
        assert guarding is not None
        guarding.stopped(self.invariants.durable)
        before = dict(self.training.history)
        _, world = self._play(self.scenario.lives[-1], self.scenario.spec.trainer.steps)
        require(isinstance(world.decided, GuardStop), f"the stopped run ended with {world.decided!r}")
        require(self.training.history == before, f"the stopped run trained {sorted(self.training.history)}")

    def _play(self, life: LifePlan, steps: int) -> tuple[bool, World]:
        """Whether the run finished, and the world until it did, or until a fault or the guard ended it."""
        worlds: list[World] = []

        async def live() -> bool:
            world = World(
                self.scenario, life, self._disk, self.invariants, self.training, self._completions, steps=steps
            )
            worlds.append(world)
            self.invariants.begin_life(world.fleet)
            return await world.live() is not None

        self._lives += 1
        try:
            finished = run_virtual(live(), look=self.invariants.look)
            return finished, worlds[-1]
        finally:
            for world in worlds:
                self.log += [(self._lives, *line) for line in world.log.lines]
                self._virtual_s += world.log.lines[-1][0] if world.log.lines else 0.0


def after_rollback(life: LifePlan, world: World) -> LifePlan:
    """What is left of a life."""
    return msgspec.structs.replace(
        life,
        seed=life.seed + 1,
        fault_s=max(0.0, life.fault_s - world.ended_s),
        journal_bytes=max(1, life.journal_bytes - world.journal.written),
    )


def simulate_faults(seed: int) -> Outcome:
    return Simulation(draw(seed)).run()
