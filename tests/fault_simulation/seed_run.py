"""A seed, from its scenario to its verdict."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from tests.fault_simulation.components import reward_of
from tests.fault_simulation.invariants import Violation, Witness
from tests.fault_simulation.scenario import LifePlan, Scenario, draw
from tests.fault_simulation.training_invariants import Lessons
from tests.fault_simulation.world import World, prompts_of
from tidemill.core.records import Record
from tidemill.sim.simulated_trainer import SimulatedDisk
from tidemill.sim.virtual_time import Deadlock, run_virtual
from tidemill.sim.workload import EncodedCompletions

Line = tuple[int, float, str, dict[str, Any]]
"""Of the event log: which life, when in it, what."""


class Outcome(Record):
    """What became of a seed."""

    seed: int
    violation: str  # empty when everything held
    lives: int
    looks: int  # moments at which everything in flight was checked
    virtual_s: float
    events: int
    digest: str  # of the event log


class Simulation:
    """All lives of one scenario; `log` has what was told in them."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.log: list[Line] = []
        spec = scenario.spec
        completions = EncodedCompletions(scenario.longest)
        most_held = scenario.engine.slots + spec.fleet.queue_limit if scenario.elastic else math.inf
        self.witness = Witness(spec, completions, most_held=most_held)
        source = prompts_of(scenario, spec)
        size, steps = spec.batch.prompts, 4 * spec.trainer.steps + 8
        positions = {
            (epoch, prompt.prompt_id): (step - 1) * size + at
            for step in range(1, steps + 1)
            for at, (epoch, prompt) in enumerate(source.train_batch(step))
        }
        self.lessons = Lessons(self.witness, positions, reward_of)
        self._completions = completions
        self._disk = SimulatedDisk()
        self._virtual_s, self._lives = 0.0, 0

    def run(self) -> Outcome:
        violation = ""
        try:
            for life in self.scenario.lives:
                if self._live(life):
                    break
            else:
                raise Violation("the last life, which nothing ends, did not end the run")
        except Violation as found:
            violation = str(found)
        except Deadlock:
            violation = "everything waits, and nothing will ever happen"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is found
            violation = f"the controller raised {error!r}"
        return Outcome(
            seed=self.scenario.seed,
            violation=violation,
            lives=self._lives,
            looks=self.witness.looks,
            virtual_s=self._virtual_s,
            events=len(self.log),
            digest=hashlib.blake2b(msgspec.json.encode(self.log), digest_size=16).hexdigest(),
        )

    def _live(self, life: LifePlan) -> bool:
        """Whether the run came to its end."""
        if life.loses_checkpoint and self._disk.checkpoints:
            del self._disk.checkpoints[max(self._disk.checkpoints)]
        worlds: list[World] = []

        async def live() -> bool:
            world = World(self.scenario, life, self._disk, self.witness, self.lessons, self._completions)
            worlds.append(world)
            self.witness.begin_life(world.fleet)
            return await world.live() is not None

        self._lives += 1
        try:
            return run_virtual(live(), look=self.witness.look)
        finally:
            for world in worlds:
                self.log += [(self._lives, *line) for line in world.log.lines]
                self._virtual_s += world.log.lines[-1][0] if world.log.lines else 0.0


def simulate_faults(seed: int) -> Outcome:
    return Simulation(draw(seed)).run()
