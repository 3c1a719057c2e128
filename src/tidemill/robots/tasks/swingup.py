"""A cart swings a pole up and keeps it upright; only the cart is driven."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tidemill.robots.task import MODELS, Bools, EpisodeRandom, Floats, Integers, Task, Terms, Worlds

FORCE_N = 10.0
RAIL_M = 2.4
LEFT_RAIL = -50.0  # for one step, so -1: a pole that is thrown up on the way off the rail earns less
UPRIGHT = 0.95  # cosine of the pole's angle


class Swingup(Task):
    model = MODELS / "swingup.xml"
    control_s = 0.02
    episode_s = 5.0
    joints = ("slide",)
    noise: ClassVar[Mapping[str, float]] = {"pole_direction": 0.01, "cart_position": 0.005, "velocities": 0.02}

    def start(self, worlds: Worlds, rows: Integers, random: EpisodeRandom) -> None:
        worlds.qpos[rows] += random.uniform(-0.2, 0.2, 2)
        worlds.qpos[rows, 1] += np.pi  # hanging
        worlds.qvel[rows] += 0.1 * random.normal(2)

    def observe(self, worlds: Worlds) -> Mapping[str, Terms]:
        angle, cart = worlds.position("hinge"), worlds.position("slide")
        direction = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
        return {"policy": {"pole_direction": direction, "cart_position": cart, "velocities": worlds.qvel * [0.2, 0.1]}}

    def controls(self, actions: Floats) -> Floats:
        return FORCE_N * np.clip(actions, -1, 1)

    def rewards(self, worlds: Worlds) -> Terms:
        angle, cart = worlds.position("hinge")[:, 0], worlds.position("slide")[:, 0]
        return {
            "upright": 2.5 * (np.cos(angle) + 1) / 2,
            "centre": -0.125 * cart**2,
            "effort": -0.025 * np.clip(worlds.actions[:, 0], -1, 1) ** 2,
            "spin": -0.0025 * worlds.velocity("hinge")[:, 0] ** 2,
            "left_rail": LEFT_RAIL * self.terminated(worlds).astype(np.float64),
        }

    def terminated(self, worlds: Worlds) -> Bools:
        return np.abs(worlds.position("slide")[:, 0]) > RAIL_M

    def succeeding(self, worlds: Worlds) -> Bools:
        return np.cos(worlds.position("hinge")[:, 0]) > UPRIGHT
