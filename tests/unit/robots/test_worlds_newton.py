"""Newton's SolverMuJoCo against C MuJoCo, and state that moves to other worlds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tidemill.config.robot import RobotConfig
from tidemill.core.errors import UserError
from tidemill.robots.engine import Engine, actuator_of, open_engine
from tidemill.robots.task import Floats
from tidemill.robots.tasks import open_task

WORLDS = 4


def _engines(name: str) -> tuple[Engine, Engine]:
    """C MuJoCo and Newton, with other parameters in every world."""
    task = open_task(name)
    engines = [open_engine(RobotConfig(task=name, engine=each), task, WORLDS) for each in ("mujoco", "newton")]
    ends = {"mass": (0.8, 1.2), "inertia": (0.9, 1.1), "friction": (0.5, 1.5), "gains": (0.9, 1.1)}
    factors = {parameter: np.linspace(low, high, WORLDS) for parameter, (low, high) in ends.items()}
    for engine in engines:
        engine.set_parameters(np.arange(WORLDS), factors)
    return engines[0], engines[1]


def _controls(name: str, engine: Engine, steps: int) -> Iterator[Floats]:
    """Random controls, the same in every world."""
    task, random = open_task(name), np.random.default_rng(0)
    substeps = round(task.control_s / engine.model.opt.timestep)
    for _ in range(steps):
        controls = np.zeros((WORLDS, substeps, engine.model.nu))
        targets = task.controls(random.uniform(-1, 1, (1, len(task.joints))))
        controls[:, :, [actuator_of(engine.model, joint) for joint in task.joints]] = targets
        yield controls


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        pytest.param("swingup", 1e-5, id="swingup"),
        pytest.param("quadruped", 1e-3, id="quadruped", marks=pytest.mark.slow),  # a free body and contacts
    ],
)
def test_physics_are_those_of_mujoco_and_move_bit_identically(name: str, tolerance: float) -> None:
    reference, newton = _engines(name)
    expected, physics = reference.start(WORLDS), newton.start(WORLDS)
    moved = 2  # the number of worlds of another engine, to which the last rows move halfway
    width = expected.shape[1]
    for at, controls in enumerate(_controls(name, newton, 20)):
        if at == 10:
            other = open_engine(RobotConfig(task=name, engine="newton"), open_task(name), moved)
            other.set_parameters(np.arange(moved), _last_factors(moved))
            tail = physics[-moved:].copy()
        expected = reference.step(expected, controls)
        physics = newton.step(physics, controls)
        assert np.abs(physics[:, :width] - expected).max() < tolerance
        if at >= 10:
            tail = other.step(tail, controls[:moved])
            assert tail.tobytes() == physics[-moved:].tobytes()
    np.testing.assert_allclose(
        newton.sensors(physics, slice(None)), reference.sensors(expected, slice(None)), atol=tolerance
    )


def _last_factors(worlds: int) -> dict[str, Floats]:
    ends = {"mass": (0.8, 1.2), "inertia": (0.9, 1.1), "friction": (0.5, 1.5), "gains": (0.9, 1.1)}
    return {parameter: np.linspace(low, high, WORLDS)[-worlds:] for parameter, (low, high) in ends.items()}


def test_deterministic_mode_of_warp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import warp

    monkeypatch.setattr(warp.config, "deterministic", warp.DeterministicMode.RUN_TO_RUN)
    with pytest.raises(UserError, match=r"warp\.config\.deterministic is on"):
        open_engine(RobotConfig(engine="newton"), open_task("swingup"), WORLDS)


def test_model_that_newton_reads_as_another_robot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tidemill.robots import worlds_newton

    task = open_task("swingup")
    text = task.model.read_text().replace('"hinge"', '"elbow"')  # type: ignore[union-attr]
    solver: Any = worlds_newton._solver
    monkeypatch.setattr(worlds_newton, "_solver", lambda source, worlds: solver(text, worlds))
    with pytest.raises(UserError, match=r"Newton reads the joints .*elbow.*, MuJoCo slide, hinge"):
        open_engine(RobotConfig(engine="newton"), task, 1)
