"""The base class of a control task: what a robot observes, how actions move it, and what is rewarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import mujoco

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Terms = Mapping[str, Floats]
AFTER_FORCES = 3  # mujoco.mjtStage.mjSTAGE_ACC
MODELS = Path(__file__).parent / "models"


class EpisodeRandom:
    """Random numbers of worlds: those of starting episodes depend on the seed of the episode only, not on other worlds.

    Args:
        generators: each is for some rows in a row.
        rows: how many.
    """

    def __init__(self, generators: Sequence[np.random.Generator], rows: int = 1) -> None:
        self._generators, self._rows = generators, rows

    def uniform(self, low: Any, high: Any, width: int) -> Floats:
        """float64 [rows, width]."""
        return np.concatenate([each.uniform(low, high, (self._rows, width)) for each in self._generators])

    def normal(self, width: int) -> Floats:
        """float64 [rows, width], standard normal."""
        return np.concatenate([each.standard_normal((self._rows, width)) for each in self._generators])


@dataclass(slots=True, kw_only=True, eq=False)
class Worlds:
    """What a task sees of the N worlds of a shard. Arrays may be read anywhere, and written in `Task.start` only."""

    model: mujoco.MjModel  # nominal
    qpos: Floats  # [N, nq]
    qvel: Floats  # [N, nv]
    sensors: Floats  # [N, nsensordata], position and velocity sensors
    actions: Floats  # [N, A], applied in the last step, before delay
    previous_actions: Floats  # [N, A], of the step before
    steps: Integers  # [N], control steps since the episode started
    memory: dict[str, Floats] = field(default_factory=dict)  # the task's own arrays, [N, ...]

    def __len__(self) -> int:
        return len(self.qpos)

    def position(self, joint: str) -> Floats:
        """[N, 1] of a hinge or slide joint, [N, 7] of a free one."""
        start = int(self.model.joint(joint).qposadr[0])
        return self.qpos[:, start : start + _width(self.model, joint, (7, 4, 1, 1))]

    def velocity(self, joint: str) -> Floats:
        """[N, 1] of a hinge or slide joint, [N, 6] of a free one: linear in the world, angular in the body."""
        start = int(self.model.joint(joint).dofadr[0])
        return self.qvel[:, start : start + _width(self.model, joint, (6, 3, 1, 1))]

    def positions(self, joints: Sequence[str]) -> Floats:
        """[N, joints] of hinge and slide joints."""
        return np.concatenate([self.position(joint) for joint in joints], axis=1)

    def velocities(self, joints: Sequence[str]) -> Floats:
        """[N, joints] of hinge and slide joints."""
        return np.concatenate([self.velocity(joint) for joint in joints], axis=1)

    def sensor(self, name: str) -> Floats:
        """[N, width]. Raises ValueError: it measures forces or accelerations, which are known within a step only."""
        sensor = self.model.sensor(name)
        if sensor.needstage[0] == AFTER_FORCES:
            raise ValueError(
                f"the sensor {name} measures forces or accelerations; use sensors of positions or velocities"
            )
        start = int(sensor.adr[0])
        return self.sensors[:, start : start + int(sensor.dim[0])]


def _width(model: mujoco.MjModel, joint: str, widths: tuple[int, int, int, int]) -> int:
    return widths[int(model.joint(joint).type[0])]


class Task:
    """Subclass it, give it a model, and override the methods. Rewards are rates: they are multiplied by `control_s`."""

    model: ClassVar[str | Path]
    """MJCF: a file, or its text."""
    control_s: ClassVar[float] = 0.02
    """Time between two actions, in seconds; a multiple of the model's timestep."""
    episode_s: ClassVar[float] = 10.0
    """Length of an episode, in seconds, after which it is truncated."""
    joints: ClassVar[tuple[str, ...]]
    """Joints that the actions move, in the order of the actions. Every one has an actuator."""
    policies: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Named policies and the joints that each moves. Default: one policy, named "policy", for all joints."""
    obs_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"policy": ("policy",), "critic": ("policy",)}
    """The groups of observations that each policy and the critic read. Groups that only the critic reads are
    privileged: a robot cannot measure them."""
    noise: ClassVar[Mapping[str, float]] = {}
    """Standard deviation of observation noise by term, multiplied by `robot.randomise.observation_noise`."""

    def start(self, worlds: Worlds, rows: Integers, random: EpisodeRandom) -> None:
        """Set `qpos`, `qvel` and `memory` of the rows whose episodes start; they are at the model's keyframe "home", or
        at its reference pose."""

    def advance(self, worlds: Worlds) -> None:
        """Update `memory` after a control step."""

    def observe(self, worlds: Worlds) -> Mapping[str, Terms]:
        """Terms [N, width] by group and name; a group is their concatenation in this order."""
        raise NotImplementedError

    def controls(self, actions: Floats) -> Floats:
        """Targets or forces [N, joints] of the joints' actuators for actions [N, joints]."""
        raise NotImplementedError

    def rewards(self, worlds: Worlds) -> Terms:
        """Reward rates [N] by term, per second. The reward of a step is their sum times `control_s`."""
        raise NotImplementedError

    def terminated(self, worlds: Worlds) -> Bools:
        """[N], True where the episode has failed."""
        return np.zeros(len(worlds), dtype=bool)

    def succeeding(self, worlds: Worlds) -> Bools:
        """[N], True where the robot does now what the task asks for. An episode succeeds if it reaches its time limit
        and this holds in every step of its last second."""
        raise NotImplementedError

    def figures(self, worlds: Worlds) -> Terms:
        """[N] further quantities whose means over episodes are reported: a speed, a distance."""
        return {}

    @classmethod
    def named_policies(cls) -> dict[str, tuple[str, ...]]:
        return dict(cls.policies) or {"policy": cls.joints}

    @classmethod
    def steps_per_episode(cls) -> int:
        return round(cls.episode_s / cls.control_s)
