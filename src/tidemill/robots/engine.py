"""An engine of physics, which steps all worlds of a shard, and the parameters that vary between worlds."""

from __future__ import annotations

import difflib
import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tidemill.config.robot import RobotConfig
from tidemill.core.errors import UserError
from tidemill.core.packages import install_command
from tidemill.robots.task import Floats, Integers, Task

if TYPE_CHECKING:
    import mujoco

PARAMETERS = ("mass", "inertia", "friction", "gains", "delay_s")
"""What varies between worlds: factors of the model's values, and a delay in seconds."""
ROUNDING = 1e-6  # of a number of timesteps


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

    def sensors(self, physics: Floats, rows: Integers | slice) -> Floats:
        """[rows, nsensordata] of some worlds: position and velocity sensors; zeros elsewhere."""


def open_engine(config: RobotConfig, task: Task, worlds: int, *, timestep: float = 1.0) -> Engine:
    """The engine of `robot.engine` with the task's model. Raises UserError: as `check_model`."""
    model = check_model(task, config.parameters, timestep=timestep)
    if config.engine == "mujoco":
        from tidemill.robots.worlds_mujoco import MujocoWorlds

        return MujocoWorlds(model, worlds)
    try:
        from tidemill.robots.worlds_newton import NewtonWorlds
    except ImportError as error:
        what = f'engine = "newton" needs a package that is not installed ({error})'
        raise UserError(what, where="robot.engine", hint=install_command("robot")) from error
    return NewtonWorlds(model, worlds, source=model_source(task))


def check_warp() -> None:
    """Raises UserError: Warp's deterministic mode is on, which only a process can do that has imported Warp."""
    warp = sys.modules.get("warp")
    if warp is not None and warp.config.deterministic != warp.DeterministicMode.NOT_GUARANTEED:
        what = "warp.config.deterministic is on, with which Warp 1.19 compiles no MuJoCo kernels, or loses contacts"
        hint = "leave it off: on the CPU equal states give equal bits without it, on a GPU not even with it"
        raise UserError(what, where="robot.engine", hint=hint)


def check_model(task: Task, parameters: Path | None = None, *, timestep: float = 1.0) -> mujoco.MjModel:
    """Compile the task's MJCF.

    Args:
        parameters: file of identified parameters.
        timestep: factor of the model's timestep.

    Raises:
        UserError: the extra `robot` is not installed, or the model cannot be compiled or does not fit the task.
    """
    try:
        import mujoco
    except ImportError as error:
        what = f"robots need a package that is not installed ({error})"
        raise UserError(what, where="robot.task", hint=install_command("robot")) from error
    source = model_source(task)
    try:
        is_text = source.startswith("<")
        model = mujoco.MjModel.from_xml_string(source) if is_text else mujoco.MjModel.from_xml_path(source)
    except ValueError as error:
        raise UserError(f"the model cannot be compiled: {error}", where="robot.task", hint="correct the MJCF") from None
    if parameters is not None:
        from tidemill.robots.parameters import read_parameters, with_parameters

        model = with_parameters(source, model, read_parameters(parameters), where=str(parameters))
    _check_joints(task, model)
    model.opt.timestep *= timestep
    substeps = task.control_s / model.opt.timestep
    if round(substeps) < 1 or abs(substeps - round(substeps)) > ROUNDING:
        what = f"control_s = {task.control_s:g} is not a multiple of the timestep of {model.opt.timestep:g} s"
        near = max(1, round(substeps)) * model.opt.timestep
        raise UserError(what, where="robot.task", hint=f"control_s = {near:g} is, or change the model's timestep")
    if task.steps_per_episode() < 1:
        what = f"episode_s = {task.episode_s:g} is less than a control step of {task.control_s:g} s"
        raise UserError(what, where="robot.task", hint="write the length of an episode in seconds")
    return model


def model_digest(model: mujoco.MjModel) -> str:
    """Digest of a compiled model, with its meshes and the files that it includes."""
    import mujoco

    buffer = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return hashlib.blake2b(buffer.tobytes(), digest_size=16).hexdigest()


def model_source(task: Task) -> str:
    """MJCF, or the path of a file. A relative path starts at the folder of the file that defines the class."""
    text = str(task.model).lstrip()
    if text.startswith("<"):
        return text
    owner = next(cls for cls in type(task).__mro__ if "model" in vars(cls))
    file = getattr(sys.modules[owner.__module__], "__file__", None)
    return str(Path(file or "").parent / text)


def _check_joints(task: Task, model: mujoco.MjModel) -> None:
    """Raises UserError: an action would move nothing."""
    if not model.nu:
        hint = "add an <actuator> for each joint that actions move"
        raise UserError("the model has no actuators", where="robot.task", hint=hint)
    names = [model.joint(at).name for at in range(model.njnt)]
    for joint in task.joints:
        if task.joints.count(joint) > 1:
            raise UserError(f'joints name "{joint}" twice', where="robot.task", hint="name every joint once")
        known_name(joint, names, "joint")
        if actuator_of(model, joint) < 0:
            driven = [each for each in names if each and actuator_of(model, each) >= 0]
            hint = f"add one to the MJCF; joints with an actuator: {', '.join(driven)}"
            raise UserError(f'joint "{joint}" has no actuator', where="robot.task", hint=hint)
    policies = task.named_policies()
    moved = sorted(joint for joints in policies.values() for joint in joints)
    if moved != sorted(task.joints):
        what = f"policies name the joints {', '.join(moved)}, and joints {', '.join(sorted(task.joints))}"
        raise UserError(what, where="robot.task", hint="name every joint in one policy")
    if "critic" in policies:
        hint = "rename it: obs_groups has the groups of the critic by this name"
        raise UserError('a policy has the name "critic"', where="robot.task", hint=hint)
    for name in (*policies, "critic"):
        if name not in task.obs_groups:
            what = f"obs_groups does not name the groups that {name} reads"
            raise UserError(what, where="robot.task", hint=f'add "{name}": (...) to obs_groups')


def known_name(name: str, known: Iterable[str], what: str, *, where: str = "robot.task") -> None:
    """Raises UserError, with the closest name: the task has no such joint, group, ..."""
    names = [each for each in known if each]
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(names)}"
        raise UserError(f'there is no {what} "{name}"', where=where, hint=hint)


def actuator_of(model: mujoco.MjModel, joint: str) -> int:
    """The actuator that moves a joint; -1 without one."""
    joint_id = model.joint(joint).id
    moves_joint = (model.actuator_trntype == 0) & (model.actuator_trnid[:, 0] == joint_id)
    return int(moves_joint.argmax()) if moves_joint.any() else -1
