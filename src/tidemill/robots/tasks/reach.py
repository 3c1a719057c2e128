"""An arm with 4 joints, which are driven by their velocity, moves its tip to a random point and stays there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tidemill.robots.task import MODELS, Bools, EpisodeRandom, Floats, Integers, Task, Terms, Worlds

TOLERANCE_M = 0.02
NEAR_M = 0.05  # distance at which most of the reward for precision is lost
LARGEST_SPEED = 2.0  # of a joint, rad/s
SHOULDER_M = 0.2  # height above the floor
TARGETS = ((0.3, -1.5, -0.2), (0.55, 1.5, 0.7))  # lowest, highest: distance from the shoulder in m; azimuth, elevation
TARGET = ("target_x", "target_y", "target_z")


class Reach(Task):
    model = MODELS / "reach.xml"
    control_s = 0.04
    episode_s = 4.0
    joints = ("yaw", "shoulder", "elbow", "wrist")
    noise: ClassVar[Mapping[str, float]] = {"joint_positions": 0.005, "joint_velocities": 0.05, "error": 0.002}

    def start(self, worlds: Worlds, rows: Integers, random: EpisodeRandom) -> None:
        distance, azimuth, elevation = random.uniform(*TARGETS, 3).T
        away = distance * np.cos(elevation)
        height = SHOULDER_M + distance * np.sin(elevation)
        worlds.qpos[rows, 4:] = np.stack([away * np.cos(azimuth), away * np.sin(azimuth), height], axis=1)
        worlds.qpos[rows, :4] += random.uniform(-0.3, 0.3, 4)

    def observe(self, worlds: Worlds) -> Mapping[str, Terms]:
        return {
            "policy": {
                "joint_positions": worlds.positions(self.joints),
                "joint_velocities": worlds.velocities(self.joints),
                "error": self.cylindrical_error(worlds),
            }
        }

    def cylindrical_error(self, worlds: Worlds) -> Floats:
        """From the tip to the target as the arm sees it, [N, 3]: azimuth from its plane, distance from its axis,
        height."""
        yaw = worlds.position("yaw")[:, 0]
        target, tip = worlds.positions(TARGET), worlds.sensor("tip")
        azimuth = np.arctan2(target[:, 1], target[:, 0]) - yaw
        away = np.hypot(target[:, 0], target[:, 1]) - (np.cos(yaw) * tip[:, 0] + np.sin(yaw) * tip[:, 1])
        return np.stack([azimuth, away, target[:, 2] - tip[:, 2]], axis=1)

    def distance(self, worlds: Worlds) -> Floats:
        """From the tip to the target, [N], m."""
        return np.asarray(np.linalg.norm(worlds.positions(TARGET) - worlds.sensor("tip"), axis=1))

    def controls(self, actions: Floats) -> Floats:
        return LARGEST_SPEED * np.clip(actions, -1, 1)

    def rewards(self, worlds: Worlds) -> Terms:
        distance = self.distance(worlds)
        change = worlds.actions - worlds.previous_actions
        return {
            "distance": -4.0 * distance,
            "precision": 2.0 * np.exp(-distance / NEAR_M),
            "effort": -0.002 * np.square(worlds.velocities(self.joints)).sum(1),
            "change": -0.005 * np.square(change).sum(1),
        }

    def succeeding(self, worlds: Worlds) -> Bools:
        return self.distance(worlds) < TOLERANCE_M

    def figures(self, worlds: Worlds) -> Terms:
        return {"distance": self.distance(worlds)}
