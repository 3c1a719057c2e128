"""What a process needs to know to simulate: it travels to workers as JSON, and `build` makes the simulation there."""

from __future__ import annotations

from typing import Any

from tidemill.config.robot import WORLDS_PER_SHARD, RobotConfig
from tidemill.config.schema import RunSpec
from tidemill.core.records import Record
from tidemill.robots.engine import open_engine
from tidemill.robots.simulation import Simulation
from tidemill.robots.tasks import open_task


class SimulationSetup(Record):
    """One simulation; all of its chunks use the same one."""

    robot: dict[str, Any]  # [robot] as JSON
    obs_groups: dict[str, tuple[str, ...]]
    activation: str
    worlds: int = WORLDS_PER_SHARD
    timestep: float = 1.0  # factor of the model's timestep


def setup_of(spec: RunSpec) -> SimulationSetup:
    """The simulation in which a run trains."""
    groups = dict(open_task(spec.robot.task).obs_groups) | spec.control.obs_groups
    return SimulationSetup(
        robot=spec.robot.model_dump(mode="json"), obs_groups=groups, activation=spec.control.activation
    )


def build(setup: SimulationSetup) -> Simulation:
    """Raises UserError: the task or its model cannot be used."""
    config = RobotConfig.model_validate(setup.robot)
    task = open_task(config.task)
    return Simulation(
        task,
        open_engine(config, task, setup.worlds, timestep=setup.timestep),
        worlds=setup.worlds,
        randomise=config.randomise,
        history=config.history,
        activation=setup.activation,
        obs_groups=setup.obs_groups,
    )
