"""A control task that can be computed by hand: a mass of 1 kg on a rail without friction, driven by a force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from tidemill.config.robot import RandomiseConfig
from tidemill.core.chunks import ChunkKey, ChunkRequest
from tidemill.robots.engine import check_model
from tidemill.robots.policy_arrays import EPSILON, unpack
from tidemill.robots.simulation import Simulation, State
from tidemill.robots.task import Bools, EpisodeRandom, Floats, Integers, Task, Terms, Worlds
from tidemill.robots.worlds_mujoco import MujocoWorlds

SLIDER = """
<mujoco>
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody>
    <body>
      <joint name="slide" type="slide" axis="1 0 0"/>
      <geom type="sphere" size="0.1" mass="1"/>
    </body>
  </worldbody>
  <actuator><motor joint="slide"/></actuator>
</mujoco>
"""


class Slider(Task):
    """Its first observation is the number of steps, so that a policy can act by a schedule."""

    model = SLIDER
    control_s = 0.04
    episode_s = 1.2
    joints = ("slide",)
    obs_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"policy": ("policy",), "critic": ("policy", "exact")}
    noise: ClassVar[Mapping[str, float]] = {"speed": 0.5}

    def start(self, worlds: Worlds, rows: Integers, random: EpisodeRandom) -> None:
        start = worlds.memory.setdefault("start", np.zeros((len(worlds), 1)))
        start[rows] = random.uniform(-1, 1, 1)

    def observe(self, worlds: Worlds) -> Mapping[str, Terms]:
        steps = worlds.steps[:, None].astype(np.float64)
        return {
            "policy": {"steps": steps, "speed": worlds.qvel.copy()},
            "exact": {"speed": worlds.qvel.copy(), "start": worlds.memory["start"]},
        }

    def controls(self, actions: Floats) -> Floats:
        return actions

    def rewards(self, worlds: Worlds) -> Terms:
        return {"speed": worlds.qvel[:, 0], "constant": np.full(len(worlds), 2.0)}

    def terminated(self, worlds: Worlds) -> Bools:
        return worlds.qvel[:, 0] > 1e3

    def succeeding(self, worlds: Worlds) -> Bools:
        return worlds.qvel[:, 0] >= 0

    def figures(self, worlds: Worlds) -> Terms:
        return {"steps": worlds.steps.astype(np.float64)}


def linear_weights(matrix: Any, bias: Any, *, std: float = 1.0, policy: str = "policy") -> dict[str, Any]:
    """A policy whose mean action is a linear function of the observation."""
    matrix = np.atleast_2d(np.asarray(matrix, dtype=np.float32))
    width = matrix.shape[1]
    return {
        f"{policy}.normaliser.mean": np.zeros(width, dtype=np.float32),
        f"{policy}.normaliser.variance": np.full(width, 1 - EPSILON, dtype=np.float32),
        f"{policy}.layers.0.weight": matrix,
        f"{policy}.layers.0.bias": np.atleast_1d(np.asarray(bias, dtype=np.float32)),
        f"{policy}.log_std": np.full(len(matrix), np.log(std), dtype=np.float32),
    }


def simulate(task: Task, *, worlds: int = 4, history: int = 1, **randomise: Any) -> Simulation:
    """C MuJoCo's simulation of a task."""
    return Simulation(
        task,
        MujocoWorlds(check_model(task), worlds),
        worlds=worlds,
        history=history,
        randomise=RandomiseConfig(**randomise),
    )


def played(simulation: Simulation, weights: Mapping[str, Any], steps: int, **request: Any) -> State:
    """The experience of a first chunk without exploration."""
    settings = {"deterministic": True, "record": True} | request
    key = ChunkKey(seed=0, purpose="test", shard=0, iteration=0)
    return unpack(simulation.run(weights, ChunkRequest(key=key, steps=steps, **settings)).experience)
