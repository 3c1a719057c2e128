"""Two carts lift a beam that lies on their forks and carry it to a random place, each with a policy of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tidemill.robots.task import MODELS, Bools, EpisodeRandom, Floats, Integers, Task, Terms, Worlds

CARTS = ("left", "right")
DRIVE_SPEED = 1.0  # m/s
LIFT_M = 0.2  # a fork's height at action 0, and its range around that
HOLD_M = 0.2  # the height above its start at which the beam is to be carried
FARTHEST_M = 1.0  # of a target from the start
TOLERANCE_M = 0.05
LARGEST_TILT = 0.1  # of success, rad
DROPPED_TILT = 0.5  # rad
LOST_M = 0.25  # a fork this far from its place under the beam has lost it


class Tandem(Task):
    model = MODELS / "tandem.xml"
    control_s = 0.04
    episode_s = 6.0
    joints = ("left_drive", "left_lift", "right_drive", "right_lift")
    policies: ClassVar[Mapping[str, tuple[str, ...]]] = {cart: (f"{cart}_drive", f"{cart}_lift") for cart in CARTS}
    obs_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "left": ("left",),
        "right": ("right",),
        "critic": ("left", "right", "beam"),
    }
    noise: ClassVar[Mapping[str, float]] = {"fork": 0.005, "velocities": 0.02, "tilt": 0.01, "target": 0.01}

    def start(self, worlds: Worlds, rows: Integers, random: EpisodeRandom) -> None:
        target = worlds.memory.setdefault("target", np.zeros((len(worlds), 1)))
        target[rows] = random.uniform(-FARTHEST_M, FARTHEST_M, 1)
        worlds.qpos[rows] += random.uniform(-0.03, 0.03, 7) * [1, 0, 1, 0, 1, 0, 0]

    def observe(self, worlds: Worlds) -> Mapping[str, Terms]:
        tilt, turn = worlds.position("beam_tilt"), worlds.velocity("beam_tilt")
        speeds = worlds.velocities(("beam_x", "beam_z"))
        shifts = self.shifts(worlds)
        own = {
            cart: {
                "fork": np.concatenate([shifts[:, [at]], worlds.position(f"{cart}_lift")], axis=1),
                "velocities": worlds.velocities(self.policies[cart]),
                "tilt": np.concatenate([tilt, turn], axis=1),
                "target": worlds.memory["target"] - worlds.position(f"{cart}_drive"),
            }
            for at, cart in enumerate(CARTS)
        }
        return {**own, "beam": {"speeds": speeds, "height": worlds.position("beam_z"), "error": self.error(worlds)}}

    def shifts(self, worlds: Worlds) -> Floats:
        """Of the forks from their places under the beam, [N, 2]."""
        return worlds.positions([f"{cart}_drive" for cart in CARTS]) - worlds.position("beam_x")

    def tilt(self, worlds: Worlds) -> Floats:
        """[N], rad."""
        return worlds.position("beam_tilt")[:, 0]

    def error(self, worlds: Worlds) -> Floats:
        """From the beam to its target and to the height of carrying, [N, 2]."""
        place = worlds.memory["target"] - worlds.position("beam_x")
        return np.concatenate([place, HOLD_M - worlds.position("beam_z")], axis=1)

    def controls(self, actions: Floats) -> Floats:
        clipped = np.clip(actions, -1, 1)
        return clipped * [DRIVE_SPEED, LIFT_M, DRIVE_SPEED, LIFT_M] + [0, LIFT_M, 0, LIFT_M]

    def rewards(self, worlds: Worlds) -> Terms:
        place, height = np.abs(self.error(worlds)).T
        shifts = self.shifts(worlds)
        change = worlds.actions - worlds.previous_actions
        return {
            "place": 1.0 - place + np.exp(-place / TOLERANCE_M),
            "height": 1.0 - 5.0 * height,
            "level": -2.0 * np.abs(self.tilt(worlds)),
            "grip": -2.0 * np.abs(shifts).sum(1),
            "change": -0.02 * np.square(change).sum(1),
            "dropped": -50.0 * self.terminated(worlds).astype(np.float64),
        }

    def terminated(self, worlds: Worlds) -> Bools:
        shifts = self.shifts(worlds)
        return np.asarray((np.abs(shifts) > LOST_M).any(1) | (np.abs(self.tilt(worlds)) > DROPPED_TILT))

    def succeeding(self, worlds: Worlds) -> Bools:
        near = (np.abs(self.error(worlds)) < TOLERANCE_M).all(1)
        return np.asarray(near & (np.abs(self.tilt(worlds)) < LARGEST_TILT))

    def figures(self, worlds: Worlds) -> Terms:
        place, height = np.abs(self.error(worlds)).T
        return {"place_error": place, "height_error": height, "tilt": np.abs(self.tilt(worlds))}
