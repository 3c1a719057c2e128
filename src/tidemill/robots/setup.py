"""What a process needs to know to simulate: it travels to workers as JSON, and `build` makes the simulation there."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.config.robot import WORLDS_PER_SHARD, RandomiseConfig, RobotConfig
from tidemill.core.chunks import Array, ChunkAnswer, ChunkRequest
from tidemill.core.errors import UserError, exception_text
from tidemill.core.records import Record
from tidemill.robots.engine import known_name, open_engine
from tidemill.robots.policy_arrays import Weights, unpack
from tidemill.robots.simulation import Simulation
from tidemill.robots.task import Task
from tidemill.robots.tasks import open_task

if TYPE_CHECKING:  # slow to import, and workers do not need it
    from tidemill.config.schema import RunSpec
    from tidemill.robots.policy_folder import PolicyDescription
    from tidemill.robots.vecenv import EnvironmentSimulation, EnvironmentTask


class SimulationSetup(Record):
    """One simulation; all of its chunks use the same one."""

    robot: dict[str, Any]  # [robot] as JSON
    obs_groups: dict[str, tuple[str, ...]]
    activation: str
    worlds: int = WORLDS_PER_SHARD
    timestep: float = 1.0  # factor of the model's timestep


def task_of(config: RobotConfig) -> Task | EnvironmentTask:
    """The task, or what stands for it with an environment. Raises UserError: as `build`."""
    if not config.environment:
        return open_task(config.task)
    from tidemill.robots.vecenv import EnvironmentTask

    return EnvironmentTask(config)


def setup_of(spec: RunSpec) -> SimulationSetup:
    """The simulation in which a run trains."""
    groups = dict(task_of(spec.robot).obs_groups) | spec.control.obs_groups
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
    from tidemill.robots.policy_folder import PolicyDescription

    setup, robot, task = setup_of(spec), spec.robot, task_of(spec.robot)
    if isinstance(task, Task):
        # C MuJoCo starts at once; layouts are the same in every engine.
        small = msgspec.structs.replace(setup, robot=setup.robot | {"engine": "mujoco"}, worlds=1)
        layout = build(msgspec.structs.replace(small, obs_groups=dict(task.obs_groups))).layout()
    else:
        layout = task.layout
    names = [*task.named_policies(), "critic"]
    for name, groups in spec.control.obs_groups.items():
        known_name(name, names, "policy", where="control.obs_groups")
        for group in groups:
            known_name(group, layout, "group of observations", where=f"control.obs_groups.{name}")
    parameters: dict[str, Any] = {"randomise": robot.randomise.model_dump(mode="json")}
    if robot.parameters is not None:
        from tidemill.robots.parameters import read_parameters

        parameters["identified"] = read_parameters(robot.parameters)
    return PolicyDescription(
        task=robot.environment or robot.task,
        engine=robot.engine,
        control_s=task.control_s,
        joints=task.joints,
        policies=task.named_policies(),
        obs_groups=setup.obs_groups,
        layout=layout,
        history=robot.history,
        activation=spec.control.activation,
        parameters=parameters,
    )


def open_simulation(setup: SimulationSetup, shards: int = 1) -> Simulation | EnvironmentSimulation:
    """Of a task, or of an environment of another package, whose shards are not computed together. Raises UserError: it
    cannot be used."""
    config = RobotConfig.model_validate(setup.robot)
    if not config.environment:
        return build(setup, shards)
    from tidemill.robots.vecenv import EnvironmentSimulation

    return EnvironmentSimulation(config, worlds=setup.worlds, activation=setup.activation, obs_groups=setup.obs_groups)


def build(setup: SimulationSetup, shards: int = 1) -> Simulation:
    """Raises UserError: the task or its model cannot be used."""
    config = RobotConfig.model_validate(setup.robot)
    task = open_task(config.task)
    return Simulation(
        task,
        open_engine(config, task, shards * setup.worlds, timestep=setup.timestep),
        worlds=shards * setup.worlds,
        shards=shards,
        randomise=config.randomise,
        history=config.history,
        activation=setup.activation,
        obs_groups=setup.obs_groups,
    )


class Simulations:
    """What computes chunks in one process: its simulations, and the weights of the newest version and the one before.

    Args:
        setups: by the number in `ChunkRequest.setup`.
    """

    def __init__(self, setups: Sequence[SimulationSetup]) -> None:
        self._setups = setups
        self._built: dict[tuple[int, int], Simulation | EnvironmentSimulation] = {}
        self._weights: dict[int, Weights] = {}

    def load(self, number: int, weights: Mapping[str, Array]) -> None:
        """Use the weights of a version from now on."""
        self._weights = {each: found for each, found in self._weights.items() if each >= number - 1}
        self._weights[number] = unpack(weights)

    def run(self, version: int, requests: Sequence[ChunkRequest]) -> list[ChunkAnswer]:
        """Compute chunks of one setup that differ in keys and states only, and all have a state, or none.

        Raises:
            UserError: as `open_simulation`, or the task or environment fails: it would on every worker.
        """
        try:
            return self._run(version, requests)
        except UserError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            hint = f"it was raised in {last.filename}, line {last.lineno} ({last.name})"
            raise UserError(f"the simulation failed: {exception_text(error)}", where="robot", hint=hint) from error

    def _run(self, version: int, requests: Sequence[ChunkRequest]) -> list[ChunkAnswer]:
        number = requests[0].setup
        place = number, 1 if self._setups[number].robot["environment"] else len(requests)
        if place not in self._built:
            self._built[place] = open_simulation(self._setups[number], place[1])
        simulation, weights = self._built[place], self._weights[version]
        if isinstance(simulation, Simulation):
            return simulation.run_together(weights, requests, version=version)
        return [simulation.run(weights, request, version=version) for request in requests]

    def close(self) -> None:
        """End the processes of environments."""
        for simulation in self._built.values():
            if not isinstance(simulation, Simulation):
                simulation.close()
