"""A quadruped with 12 joints walks forward at the speed of its command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tidemill.robots.task import MODELS, Bools, EpisodeRandom, Floats, Integers, Task, Terms, Worlds

HOME = np.tile([0.0, 0.65, -1.3], 4)  # the joints of the keyframe, rad
ACTION_SCALE = 0.25  # rad
LARGEST_ACTION = 4.0
COMMANDS = (0.5, 1.5)  # m/s
TOLERANCE = 0.2  # m/s
SPEED_WINDOW_S = 0.4  # time constant of the average that success is judged by: a stride
STRIDE_S = 0.4  # FL and RR step together, then FR and RL: a trot
LEG_M = 0.29  # height of the hips
LIFT = 0.5  # flexion of the knee of a leg that steps, rad
GAIT_RAD = 0.25  # a joint this far from the gait has lost most of its reward
LOWEST_M = 0.16
GREATEST_TILT = 0.5  # cosine of the angle between the body's axis and the vertical


class Quadruped(Task):
    model = MODELS / "quadruped.xml"
    control_s = 0.02
    episode_s = 10.0
    joints = tuple(f"{leg}_{joint}" for leg in ("FL", "FR", "RL", "RR") for joint in ("hip", "thigh", "calf"))
    obs_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"policy": ("policy",), "critic": ("policy", "privileged")}
    noise: ClassVar[Mapping[str, float]] = {
        "gravity": 0.03,
        "angular_velocity": 0.2,
        "joint_positions": 0.01,
        "joint_velocities": 1.0,
    }

    def start(self, worlds: Worlds, rows: Integers, random: EpisodeRandom) -> None:
        command = worlds.memory.setdefault("command", np.zeros((len(worlds), 1)))
        speed = worlds.memory.setdefault("speed", np.zeros((len(worlds), 1)))
        command[rows] = random.uniform(*COMMANDS, 1)
        speed[rows] = 0
        worlds.qpos[rows, 7:] += random.uniform(-0.1, 0.1, 12)
        worlds.qvel[rows] += 0.05 * random.normal(18)

    def advance(self, worlds: Worlds) -> None:
        forward = heading_velocity(worlds)[:, :1]
        speed = worlds.memory["speed"]
        speed += self.control_s / SPEED_WINDOW_S * (forward - speed)

    def observe(self, worlds: Worlds) -> Mapping[str, Terms]:
        rotation = rotations(worlds.qpos[:, 3:7])
        phase = self.phase(worlds)
        linear = np.einsum("nij,ni->nj", rotation, worlds.qvel[:, :3])
        return {
            "policy": {
                "gravity": -rotation[:, 2],
                "angular_velocity": worlds.qvel[:, 3:6],
                "joint_positions": worlds.qpos[:, 7:] - HOME,
                "joint_velocities": worlds.qvel[:, 6:],
                "previous_actions": worlds.actions,
                "command": worlds.memory["command"],
                "clock": np.concatenate([np.sin(phase), np.cos(phase)], axis=1),
            },
            "privileged": {"linear_velocity": linear, "height": worlds.qpos[:, 2:3], "speed": worlds.memory["speed"]},
        }

    def phase(self, worlds: Worlds) -> Floats:
        """Of the stride, [N, 1]: a clock in the robot's computer, which starts with the episode."""
        return np.asarray(2 * np.pi / STRIDE_S * self.control_s * worlds.steps[:, None])

    def gait(self, worlds: Worlds) -> Floats:
        """Joint positions [N, 12] of a trot at the command's speed: a guide for exploration, not a target."""
        swing = self.phase(worlds) + np.array([0, np.pi, np.pi, 0])  # [N, legs]
        sweep = -worlds.memory["command"] * STRIDE_S / 4 / LEG_M * np.cos(swing)
        lift = LIFT * np.maximum(0, -np.sin(swing))
        joints = np.stack([np.zeros_like(lift), sweep + lift / 2, -lift], axis=2)
        return np.asarray(HOME + joints.reshape(len(worlds), 12))

    def controls(self, actions: Floats) -> Floats:
        return HOME + ACTION_SCALE * np.clip(actions, -LARGEST_ACTION, LARGEST_ACTION)

    def rewards(self, worlds: Worlds) -> Terms:
        velocity, turn = heading_velocity(worlds), worlds.qvel[:, 3:6]
        error = np.abs(velocity[:, 0] - worlds.memory["command"][:, 0])
        change = worlds.actions - worlds.previous_actions
        return {
            "command": 2.0 - 2.0 * error + np.exp(-np.square(error / TOLERANCE)),
            "sideways": -0.5 * np.abs(velocity[:, 1]),
            "turn": -0.2 * np.abs(turn[:, 2]),
            "vertical": -0.15 * np.abs(worlds.qvel[:, 2]),
            "gait": 2.0 * np.exp(-np.square((worlds.qpos[:, 7:] - self.gait(worlds)) / GAIT_RAD)).mean(1),
            "upright": 0.5 * upright(worlds),
            "effort": -0.01 * np.square(worlds.actions).sum(1),
            "change": -0.01 * np.square(change).sum(1),
            "fall": -50.0 * self.terminated(worlds).astype(np.float64),
        }

    def terminated(self, worlds: Worlds) -> Bools:
        return (worlds.qpos[:, 2] < LOWEST_M) | (upright(worlds) < GREATEST_TILT)

    def succeeding(self, worlds: Worlds) -> Bools:
        error = np.abs(worlds.memory["speed"] - worlds.memory["command"])[:, 0]
        return error < TOLERANCE

    def figures(self, worlds: Worlds) -> Terms:
        forward = heading_velocity(worlds)[:, 0]
        return {
            "command": worlds.memory["command"][:, 0],
            "speed": forward,
            "speed_error": np.abs(worlds.memory["speed"] - worlds.memory["command"])[:, 0],
            "tilt": np.arccos(np.clip(upright(worlds), -1, 1)),
        }


def rotations(quaternions: Floats) -> Floats:
    """Matrices [N, 3, 3] from the body to the world, for unit quaternions [N, 4], scalar first."""
    w, x, y, z = quaternions.T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), -1, 0)


def upright(worlds: Worlds) -> Floats:
    """Cosine of the body's tilt, [N]."""
    return np.asarray(1 - 2 * np.square(worlds.qpos[:, 4:6]).sum(1))


def heading_velocity(worlds: Worlds) -> Floats:
    """Velocity in the plane, [N, 2]: along the body's heading, and to its left."""
    w, x, y, z = worlds.qpos[:, 3:7].T
    yaw = np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z))
    cosine, sine = np.cos(yaw), np.sin(yaw)
    east, north = worlds.qvel[:, 0], worlds.qvel[:, 1]
    return np.stack([cosine * east + sine * north, cosine * north - sine * east], axis=1)
