"""A trajectory of actions, its cost and its gradient through Newton's differentiable physics (Featherstone, float32).

Warp's tape differentiates the physics from controls to joint positions and velocities. What the task computes in numpy,
controls from actions and rewards from states, is differentiated numerically, which is exact enough in float64. Every
step has its own solver: one that is used twice on a tape overwrites what the backward pass of the earlier step reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import warp as wp

from tidemill.core.errors import UserError
from tidemill.robots.engine import Engine, actuator_of
from tidemill.robots.simulation import random_of
from tidemill.robots.task import EpisodeRandom, Floats, Task, Worlds

wp.config.log_level = max(wp.config.log_level, 40)  # errors; otherwise each compiled kernel prints a line

import newton  # noqa: E402 -- after the level above

STEP = 1e-6  # of numerical derivatives of the task's functions
CHECK_STEP = 0.02  # of the finite differences through float32 physics, in units of actions


@wp.kernel  # type: ignore[untyped-decorator]
def _actuate(
    step: int,
    controls: wp.array2d[float],
    columns: wp.array[int],
    constants: wp.array2d[float],
    joint_q: wp.array[float],
    joint_qd: wp.array[float],
    joint_f: wp.array[float],
) -> None:
    """MuJoCo's affine actuators: constants [actuators, 9] are gear, gain, bias (3), control and force ranges."""
    at = wp.tid()
    gear = constants[at, 0]
    control = wp.clamp(controls[step, at], constants[at, 5], constants[at, 6])
    length = gear * joint_q[columns[at]]
    speed = gear * joint_qd[columns[at]]
    force = constants[at, 1] * control + constants[at, 2] + constants[at, 3] * length + constants[at, 4] * speed
    joint_f[columns[at]] = gear * wp.clamp(force, constants[at, 7], constants[at, 8])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Path:
    """The states after each of T actions."""

    qpos: Floats  # [T, nq], in MuJoCo's order
    qvel: Floats  # [T, nv]


class NewtonPhysics:
    """T control steps of one world on the CPU, and their gradient.

    Args:
        source: MJCF, a file or its text, of hinge and slide joints.
        model: compiled from it.
        open_solver: makes the solver of one physics step.

    Raises:
        UserError: `open_solver` returns the same solver for two steps.
    """

    def __init__(
        self,
        source: str,
        model: mujoco.MjModel,
        joints: tuple[str, ...],
        *,
        steps: int,
        substeps: int,
        open_solver: Callable[[newton.Model], Any] = newton.solvers.SolverFeatherstone,
    ) -> None:
        builder = newton.ModelBuilder()
        builder.add_mjcf(source)
        self._model = builder.finalize(device="cpu", requires_grad=True)
        self._model.joint_target_ke.zero_()  # `_actuate` computes servos
        self._model.joint_target_kd.zero_()
        self.substeps, self._timestep = substeps, float(model.opt.timestep)
        names = [str(label).rsplit("/", 1)[-1] for label in builder.joint_label]
        columns = {name: int(builder.joint_qd_start[at]) for at, name in enumerate(names)}
        self._columns = np.array([columns[model.joint(at).name] for at in range(model.njnt)])  # of MuJoCo's joints
        count = steps * substeps
        self._states = [self._model.state() for _ in range(count + 1)]
        self._drives = [self._model.control() for _ in range(count)]
        self._solvers = [open_solver(self._model) for _ in range(count)]
        if len({id(solver) for solver in self._solvers}) < count:
            what = "one solver is used for several steps of a gradient tape, which gives wrong gradients"
            raise UserError(what, where="open_solver", hint="return a new solver at each call")
        self._constants = wp.array(np.stack([_constants(model, joint) for joint in joints]), dtype=float, device="cpu")
        self._actuated = wp.array([columns[joint] for joint in joints], dtype=int, device="cpu")

    def run(self, qpos: Floats, qvel: Floats, controls: Floats) -> tuple[Path, wp.Tape, wp.array]:
        """Physics from a state with controls [T, joints].

        Returns:
            the states; the tape; the controls on it.
        """
        self._assign(self._states[0].joint_q, qpos)
        self._assign(self._states[0].joint_qd, qvel)
        held = wp.array(controls, dtype=float, device="cpu", requires_grad=True)
        tape = wp.Tape()
        with tape:
            for at, solver in enumerate(self._solvers):
                state, drive = self._states[at], self._drives[at]
                state.clear_forces()
                inputs = [at // self.substeps, held, self._actuated, self._constants, state.joint_q, state.joint_qd]
                wp.launch(_actuate, len(controls[0]), inputs, [drive.joint_f], device="cpu")
                solver.step(state, self._states[at + 1], drive, None, self._timestep)
        after = self._states[self.substeps :: self.substeps]
        qpos, qvel = (
            np.stack([getattr(state, name).numpy()[self._columns] for state in after]).astype(np.float64)
            for name in ("joint_q", "joint_qd")
        )
        return Path(qpos=qpos, qvel=qvel), tape, held

    def backward(self, tape: wp.Tape, held: wp.array, slopes: Path) -> Floats:
        """Gradient of the cost for the controls, [T, joints], from that for the states."""
        grads = {}
        for at, state in enumerate(self._states[self.substeps :: self.substeps]):
            for array, values in ((state.joint_q, slopes.qpos), (state.joint_qd, slopes.qvel)):
                grads[array] = wp.zeros_like(array)
                self._assign(grads[array], values[at])
        tape.backward(grads=grads)
        gradient = np.array(held.grad.numpy(), dtype=np.float64)
        tape.zero()
        return gradient

    def _assign(self, target: wp.array, values: Floats) -> None:
        row = np.zeros(len(target), dtype=np.float32)
        row[self._columns] = values
        target.assign(row)


def _constants(model: mujoco.MjModel, joint: str) -> Floats:
    actuator = actuator_of(model, joint)
    unlimited = (-1e30, 1e30)
    control = model.actuator_ctrlrange[actuator] if model.actuator_ctrllimited[actuator] else unlimited
    force = model.actuator_forcerange[actuator] if model.actuator_forcelimited[actuator] else unlimited
    affine = (model.actuator_gainprm[actuator, 0], *model.actuator_biasprm[actuator, :3])
    return np.array([model.actuator_gear[actuator, 0], *affine, *control, *force])


class TrajectoryCost:
    """The cost of actions [T, joints]: minus the task's rewards along the trajectory, from one start.

    Args:
        engine: of the task's model, with one world; computes sensors.
        seed: of the start.
    """

    def __init__(self, task: Task, engine: Engine, physics: NewtonPhysics, *, seed: int) -> None:
        self._task, self._engine, self._physics = task, engine, physics
        model = engine.model
        _, qpos, qvel, _ = np.split(engine.start(1), np.cumsum([1, model.nq, model.nv]), axis=1)
        self._worlds = _worlds_of(model, qpos, qvel, np.zeros((1, len(task.joints))))
        task.start(self._worlds, np.arange(1), EpisodeRandom([random_of(seed, "optimise")]))
        self.qpos, self.qvel = self._worlds.qpos[0].copy(), self._worlds.qvel[0].copy()

    def __call__(self, actions: Floats) -> float:
        path, _, _ = self._physics.run(self.qpos, self.qvel, self.controls(actions))
        return self.of(path, actions)

    def of(self, path: Path, actions: Floats) -> float:
        """The cost of given states."""
        return float(self._costs([path.qpos, path.qvel, actions, _previous(actions)]).sum())

    def controls(self, actions: Floats) -> Floats:
        return np.asarray(self._task.controls(actions), dtype=np.float64)

    def control_slopes(self, actions: Floats) -> Floats:
        """Derivatives [T, controls, actions] of the controls."""
        return _derivative(self.controls, actions)

    def replay(self, actions: Floats) -> Path:
        """The states of the same actions in C MuJoCo."""
        model, joints = self._engine.model, self._task.joints
        physics = self._engine.start(1)
        kinematic = slice(1, 1 + model.nq + model.nv)
        physics[0, kinematic] = np.concatenate([self.qpos, self.qvel])
        held = np.zeros((1, self._physics.substeps, model.nu))
        rows = []
        for action in self.controls(actions):
            held[0, :, [actuator_of(model, joint) for joint in joints]] = action[:, None]
            physics = self._engine.step(physics, held)
            rows.append(physics[0, kinematic])
        qpos, qvel = np.split(np.array(rows), [model.nq], axis=1)
        return Path(qpos=qpos, qvel=qvel)

    def gradient(self, actions: Floats) -> tuple[float, Floats, Path]:
        """The cost, its gradient [T, joints] and the states."""
        path, tape, held = self._physics.run(self.qpos, self.qvel, self.controls(actions))
        arguments = [path.qpos, path.qvel, actions, _previous(actions)]
        slopes = [self._slope(arguments, at) for at in range(len(arguments))]
        through = self._physics.backward(tape, held, Path(qpos=slopes[0], qvel=slopes[1]))
        gradient = np.einsum("tca,tc->ta", self.control_slopes(actions), through) + slopes[2]
        gradient[:-1] += slopes[3][1:]
        return float(self._costs(arguments).sum()), gradient, path

    def _slope(self, arguments: Sequence[Floats], at: int) -> Floats:
        """Derivative of each step's cost for one argument, [T, width]."""

        def costs(values: Floats) -> Floats:
            return self._costs([*arguments[:at], values, *arguments[at + 1 :]])

        return _derivative(costs, arguments[at])

    def _costs(self, arguments: Sequence[Floats]) -> Floats:
        """[T] of positions, velocities, actions and the actions before; T worlds are T moments of one."""
        qpos, qvel, actions, previous = arguments
        model = self._engine.model
        worlds = _worlds_of(model, qpos, qvel, actions)
        worlds.previous_actions = previous
        worlds.steps = np.arange(1, len(qpos) + 1)
        worlds.memory = {name: np.repeat(each, len(qpos), axis=0) for name, each in self._worlds.memory.items()}
        if model.nsensor:
            physics = np.repeat(self._engine.start(1), len(qpos), axis=0)
            physics[:, 1 : 1 + model.nq + model.nv] = np.concatenate([qpos, qvel], axis=1)
            worlds.sensors = np.concatenate([self._engine.sensors(row[None], slice(None)) for row in physics])
        rates: Floats = np.sum(list(self._task.rewards(worlds).values()), axis=0)
        return -self._task.control_s * rates


def _derivative(function: Callable[[Floats], Floats], values: Floats) -> Floats:
    """[T, ..., width] of a function whose rows depend on one row of the values [T, width] each."""
    steps = STEP * np.eye(values.shape[1])
    return np.stack([(function(values + step) - function(values - step)) / (2 * STEP) for step in steps], axis=-1)


def _previous(actions: Floats) -> Floats:
    return np.concatenate([np.zeros_like(actions[:1]), actions[:-1]])


def _worlds_of(model: mujoco.MjModel, qpos: Floats, qvel: Floats, actions: Floats) -> Worlds:
    return Worlds(
        model=model,
        qpos=qpos,
        qvel=qvel,
        sensors=np.zeros((len(qpos), model.nsensordata)),
        actions=actions,
        previous_actions=np.zeros_like(actions),
        steps=np.zeros(len(qpos), dtype=np.int64),
    )


def gradient_errors(cost: TrajectoryCost, actions: Floats, *, directions: int, seed: int) -> list[float]:
    """Relative differences between the gradient and central finite differences in random directions.

    They are relative to the gradient's norm times that of the direction over the square root of its width, the
    expected derivative, because a direction may be orthogonal to the gradient by chance.
    """
    random = random_of(seed, "gradient check")
    _, gradient, _ = cost.gradient(actions)
    errors = []
    for _ in range(directions):
        direction = random.standard_normal(actions.shape)
        direction *= np.sqrt(direction.size) / np.linalg.norm(direction)
        ends = [cost(actions + step * CHECK_STEP * direction) for step in (-2, -1, 1, 2)]
        measured = (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * CHECK_STEP)  # of fourth order
        errors.append(abs(measured - float((gradient * direction).sum())) / max(float(np.linalg.norm(gradient)), 1e-9))
    return errors
