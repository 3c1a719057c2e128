from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import warp as wp

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs.optimise import check_optimise, optimise_trajectory
from tidemill.jobs.robot_checks import check_robot_stage
from tidemill.robots.task import MODELS

TASK = """
from pathlib import Path
from tidemill.robots.tasks.swingup import Swingup

class Own(Swingup):
    model = Path(__file__).with_name("own.xml")
"""


def spec_of(tmp_path: Path, **sections: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate({"run": {"dir": tmp_path / "run"}} | sections)


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ('contype="0" conaffinity="0"', 'contype="1" conaffinity="1"', "rail and cart can touch", 'contype="0"'),
        ('type="slide" axis="1 0 0"', 'type="ball"', "slide is neither a hinge nor a slide joint", "control stage"),
    ],
)
def test_models_whose_gradients_are_wrong_are_refused(
    tmp_path: Path, old: str, new: str, message: str, hint: str
) -> None:
    text = (MODELS / "swingup.xml").read_text()
    assert old in text
    (tmp_path / "own.xml").write_text(text.replace(old, new))
    (tmp_path / "tasks.py").write_text(TASK)
    with pytest.raises(UserError, match=message) as raised:
        check_optimise(spec_of(tmp_path, robot={"task": f"{tmp_path / 'tasks.py'}:Own"}))
    assert hint in raised.value.hint


def test_deterministic_warp_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wp.config, "deterministic", wp.DeterministicMode.RUN_TO_RUN)
    with pytest.raises(UserError, match="deterministic is on"):
        check_robot_stage("optimise", spec_of(tmp_path))


@pytest.mark.slow  # compiles Featherstone's kernels, 45 s on a new machine
@pytest.mark.timeout(600)
def test_a_trajectory_is_optimised_and_checked(tmp_path: Path) -> None:
    """With identified parameters, which the check in C MuJoCo has, too."""
    (tmp_path / "parameters.json").write_text('{"parameters": {"length:pole": 0.5}}')
    settings: dict[str, dict[str, Any]] = {
        "optimise": {"steps": 20, "iterations": 15},
        "robot": {"parameters": tmp_path / "parameters.json"},
    }
    found = optimise_trajectory(spec_of(tmp_path, **settings))
    figures = found["figures"]
    assert figures["gradient error"] <= 0.005
    assert figures["cost"] < figures["cost at the start"]
    assert figures["cost in C MuJoCo"] == pytest.approx(figures["cost"], abs=1e-3)
    document = json.loads(Path(found["product"]).read_text())
    assert len(document["actions"]) == len(document["positions"]) == 20
    assert len(document["costs"]) == 16
    shutil.rmtree(tmp_path / "run")
    settings["optimise"] = settings["optimise"] | {"check_tolerance": 1e-9}
    with pytest.raises(UserError, match="differs from finite differences"):
        optimise_trajectory(spec_of(tmp_path, **settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_solver_used_for_several_steps_of_a_tape_is_refused() -> None:
    import newton

    from tidemill.robots.engine import check_model
    from tidemill.robots.tasks import open_task
    from tidemill.robots.trajectory import NewtonPhysics

    solvers: list[Any] = []

    def only_one(model: newton.Model) -> Any:
        solvers.append(solvers[0] if solvers else newton.solvers.SolverFeatherstone(model))
        return solvers[0]

    task = open_task("swingup")
    with pytest.raises(UserError, match="one solver is used for several steps"):
        NewtonPhysics(str(task.model), check_model(task), task.joints, steps=2, substeps=2, open_solver=only_one)
