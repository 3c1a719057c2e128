"""What a process needs to know to simulate: it travels to workers as JSON, and `build` makes the simulation there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.config.robot import WORLDS_PER_SHARD, RandomiseConfig, RobotConfig
from tidemill.core.records import Record
from tidemill.robots.engine import known_name, open_engine
from tidemill.robots.policy_folder import PolicyDescription
from tidemill.robots.simulation import Simulation
from tidemill.robots.tasks import open_task

if TYPE_CHECKING:
    from tidemill.config.schema import RunSpec


class SimulationSetup(Record):
    """One simulation; all of its chunks use the same one."""

    robot: dict[str, Any]  # [robot] as JSON
    obs_groups: dict[str, tuple[str, ...]]
    activation: str
    worlds: int = WORLDS_PER_SHARD
    timestep: float = 1.0  # factor of the model's timestep


def setup_of(spec: RunSpec) -> SimulationSetup:
    """The simulation in which a run trains."""
    groups = dict(open_task(spec.robot.task).obs_groups) | _chosen_groups(spec)
    return SimulationSetup(
        robot=spec.robot.model_dump(mode="json"), obs_groups=groups, activation=spec.control.activation
    )


def _chosen_groups(spec: RunSpec) -> dict[str, tuple[str, ...]]:
    """`control.obs_groups`; rsl_rl calls the policy "actor"."""
    return {"policy" if name == "actor" else name: groups for name, groups in spec.control.obs_groups.items()}


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
    # C MuJoCo starts at once; layouts are the same in every engine.
    robot_json = setup.robot | {"engine": "mujoco"}
    small = msgspec.structs.replace(setup, robot=robot_json, worlds=1, obs_groups=dict(task.obs_groups))
    layout = build(small).layout()
    names = [*task.named_policies(), "critic"]
    for name, groups in _chosen_groups(spec).items():
        known_name(name, names, "policy", where="control.obs_groups")
        for group in groups:
            known_name(group, layout, "group of observations", where=f"control.obs_groups.{name}")
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
