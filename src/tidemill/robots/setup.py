"""What a process needs to know to simulate: it travels to workers as JSON, and `build` makes the simulation there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.config.robot import WORLDS_PER_SHARD, RobotConfig
from tidemill.core.chunks import Array, ChunkAnswer, ChunkRequest
from tidemill.core.records import Record
from tidemill.robots.engine import open_engine
from tidemill.robots.policy_arrays import Weights, unpack
from tidemill.robots.simulation import Simulation
from tidemill.robots.tasks import open_task

if TYPE_CHECKING:
    from tidemill.config.schema import RunSpec  # slow to import, and workers do not need it


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


class Simulations:
    """What computes chunks in one process: its simulations, and the weights of the newest version and the one before.

    Args:
        setups: by the number in `ChunkRequest.setup`.
    """

    def __init__(self, setups: Sequence[SimulationSetup]) -> None:
        self._setups = setups
        self._built: dict[int, Simulation] = {}
        self._weights: dict[int, Weights] = {}

    def load(self, number: int, weights: Mapping[str, Array]) -> None:
        """Use the weights of a version from now on."""
        self._weights = {each: found for each, found in self._weights.items() if each >= number - 1}
        self._weights[number] = unpack(weights)

    def run(self, version: int, request: ChunkRequest) -> ChunkAnswer:
        """Compute a chunk. Raises UserError: as `build`."""
        if request.setup not in self._built:
            self._built[request.setup] = build(self._setups[request.setup])
        return self._built[request.setup].run(self._weights[version], request, version=version)
