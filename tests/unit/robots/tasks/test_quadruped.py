from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest

from tests.slider import linear_weights, played, simulate
from tidemill.robots.engine import check_model
from tidemill.robots.task import Worlds
from tidemill.robots.tasks.quadruped import HOME, Quadruped, heading_velocity, rotations


def still(steps: int) -> dict[str, Any]:
    simulation = simulate(Quadruped())
    width = sum(columns for _, columns in simulation.layout()["policy"])
    return played(simulation, linear_weights(np.zeros((12, width)), np.zeros(12)), steps)


def worlds(**memory: Any) -> Worlds:
    """One world, which is turned to the left by 90° and moves north at 1 m/s."""
    model = check_model(Quadruped())
    qpos = np.concatenate([[0, 0, 0.3], [np.sqrt(0.5), 0, 0, np.sqrt(0.5)], HOME])[None]
    qvel = np.zeros((1, 18))
    qvel[0, 1] = 1.0
    return Worlds(
        model=model,
        qpos=qpos,
        qvel=qvel,
        sensors=np.zeros((1, 0)),
        actions=np.zeros((1, 12)),
        previous_actions=np.zeros((1, 12)),
        steps=np.zeros(1, dtype=np.int64),
        memory={name: np.array([[value]]) for name, value in memory.items()},
    )


def test_speed_is_measured_along_the_heading() -> None:
    np.testing.assert_allclose(heading_velocity(worlds()), [[1, 0]], atol=1e-12)


def test_rotations_are_those_of_mujoco() -> None:
    quaternions = np.random.default_rng(0).standard_normal((5, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    for quaternion, rotation in zip(quaternions, rotations(quaternions), strict=True):
        expected = np.zeros(9)
        mujoco.mju_quat2Mat(expected, quaternion)
        np.testing.assert_allclose(rotation.ravel(), expected, atol=1e-12)


@pytest.mark.parametrize(("speed", "succeeds"), [(0.85, True), (1.15, True), (0.75, False), (1.25, False)])
def test_success_is_an_average_speed_near_the_command(speed: float, succeeds: bool) -> None:
    assert Quadruped().succeeding(worlds(speed=speed, command=1.0)).tolist() == [succeeds]


def test_the_average_follows_the_speed() -> None:
    seen = worlds(speed=0.0, command=1.0)
    for _ in range(20):  # the time constant
        Quadruped().advance(seen)
    assert seen.memory["speed"][0, 0] == pytest.approx(1 - np.exp(-1), abs=0.02)


def test_a_robot_that_holds_its_pose_stands_and_does_not_succeed() -> None:
    experience = still(500)
    assert not experience["episode/fell"].any()
    assert not experience["episode/success"].any()
    commands = experience["episode/figure/command"]
    assert ((commands >= 0.5) & (commands <= 1.5)).all()
    assert len(set(commands)) == 4
    assert (experience["episode/figure/tilt"] < 0.1).all()


def test_policies_read_only_what_a_robot_measures() -> None:
    layout = dict(simulate(Quadruped()).layout())
    assert dict(layout["policy"]) == {
        "gravity": 3,
        "angular_velocity": 3,
        "joint_positions": 12,
        "joint_velocities": 12,
        "previous_actions": 12,
        "command": 1,
        "clock": 2,
    }
    assert Quadruped.obs_groups["policy"] == ("policy",)
