"""An engine of physics, which steps all worlds of a shard, and the parameters that vary between worlds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tidemill.config.robot import RobotConfig
from tidemill.core.errors import UserError
from tidemill.core.packages import install_command
from tidemill.robots.task import Floats, Integers, Task

if TYPE_CHECKING:
    import mujoco

PARAMETERS = ("mass", "inertia", "friction", "gains", "delay_s")
"""What varies between worlds: factors of the model's values, and a delay in seconds."""


class Engine(Protocol):
    """Physics of N worlds. It keeps nothing between two calls but the parameters of its worlds.

    A row of `physics` starts with MuJoCo's `mjSTATE_FULLPHYSICS` (time, qpos, qvel, act, ...); an engine may append
    what it needs to continue bit-identically.
    """

    @property
    def model(self) -> mujoco.MjModel:
        """The nominal model; also names joints and sensors."""

    def start(self, worlds: int) -> Floats:
        """Physics [worlds, width] at the keyframe "home", or at the reference pose."""

    def set_parameters(self, rows: Integers, factors: Mapping[str, Floats]) -> None:
        """Set mass, inertia, friction and gains of worlds: factors [rows] of the model's values."""

    def step(self, physics: Floats, controls: Floats) -> Floats:
        """Physics after controls [worlds, substeps, nu], one for each timestep."""

    def sensors(self, physics: Floats) -> Floats:
        """[worlds, nsensordata]: position and velocity sensors; zeros elsewhere."""


def open_engine(config: RobotConfig, task: Task, worlds: int, *, timestep: float = 1.0) -> Engine:
    """The engine of `robot.engine` with the task's model.

    Args:
        timestep: factor of the model's timestep.

    Raises:
        UserError: the extra `robot` is not installed, or the model cannot be simulated.
    """
    model = check_model(task, config.parameters, timestep=timestep)
    if config.engine == "mujoco":
        from tidemill.robots.worlds_mujoco import MujocoWorlds

        return MujocoWorlds(model, worlds)
    try:
        from tidemill.robots.worlds_newton import NewtonWorlds
    except ImportError as error:
        what = f'engine = "newton" needs a package that is not installed ({error})'
        raise UserError(what, where="robot.engine", hint=install_command("robot")) from error
    return NewtonWorlds(model, worlds)


def check_model(task: Task, parameters: Path | None = None, *, timestep: float = 1.0) -> mujoco.MjModel:
    """Compile the task's model. Raises UserError: as `open_engine`."""
    try:
        return load_model(task, parameters, timestep=timestep)
    except ImportError as error:
        what = f"robots need a package that is not installed ({error})"
        raise UserError(what, where="robot.task", hint=install_command("robot")) from error


def load_model(task: Task, parameters: Path | None = None, *, timestep: float = 1.0) -> mujoco.MjModel:
    """Compile the task's MJCF.

    Args:
        parameters: file of identified parameters.

    Raises:
        UserError: it cannot be compiled, or lacks an actuator or a joint that the task names.
    """
    import mujoco

    source = str(task.model)
    try:
        is_text = source.lstrip().startswith("<")
        model = mujoco.MjModel.from_xml_string(source) if is_text else mujoco.MjModel.from_xml_path(source)
    except ValueError as error:
        raise UserError(f"the model cannot be compiled: {error}", where="robot.task", hint="correct the MJCF") from None
    if parameters is not None:
        from tidemill.robots.parameters import read_parameters, with_parameters

        model = with_parameters(source, model, read_parameters(parameters), where=str(parameters))
    model.opt.timestep *= timestep
    return model
