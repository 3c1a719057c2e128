"""What a process needs to know to simulate: it travels to workers as JSON, and `build` makes the simulation there."""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.config.keys import did_you_mean
from tidemill.config.robot import WORLDS_PER_SHARD, RandomiseConfig, RobotConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.robots.engine import open_engine
from tidemill.robots.policy_folder import PolicyDescription
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


def undisturbed(setup: SimulationSetup) -> SimulationSetup:
    """The same without randomisation, for evaluations."""
    robot = setup.robot | {"randomise": RandomiseConfig().model_dump(mode="json")}
    return msgspec.structs.replace(setup, robot=robot)


def describe(spec: RunSpec) -> PolicyDescription:
    """The policy that a run trains.

    Raises:
        UserError: the task or its model cannot be used, or `control.obs_groups` names what the task does not have.
    """
    setup = setup_of(spec)
    robot = spec.robot
    task = open_task(robot.task)
    layout = build(msgspec.structs.replace(setup, worlds=1, obs_groups=dict(task.obs_groups))).layout()
    names = [*task.named_policies(), "critic"]
    for name, groups in spec.control.obs_groups.items():
        for given, known, what in ((name, names, "policy"), *((each, layout, "group") for each in groups)):
            if given not in known:
                hint = did_you_mean(given, known) or f"one of {', '.join(known)}"
                where = "control.obs_groups"
                raise UserError(f'the task has no {what} "{given}"', where=where, hint=hint)
    return PolicyDescription(
        task=robot.task,
        engine=robot.engine,
        control_s=task.control_s,
        joints=task.joints,
        policies=task.named_policies(),
        obs_groups=setup.obs_groups,
        layout=layout,
        history=robot.history,
        activation=spec.control.activation,
        parameters={"randomise": robot.randomise.model_dump(mode="json")},
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
