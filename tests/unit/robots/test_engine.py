from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.slider import SLIDER, Slider, linear_weights
from tidemill.config.robot import RobotConfig
from tidemill.config.schema import RunSpec
from tidemill.core.chunks import ChunkKey, ChunkRequest
from tidemill.core.errors import UserError
from tidemill.jobs.robot_checks import check_robot_stage
from tidemill.robots.engine import PARAMETERS, actuator_of, check_model
from tidemill.robots.policy_arrays import pack
from tidemill.robots.setup import Simulations, SimulationSetup
from tidemill.robots.task import Task
from tidemill.robots.tasks import TASKS, open_task
from tidemill.robots.worlds_mujoco import MujocoWorlds

TWO_JOINTS = SLIDER.replace('<joint name="slide"', '<joint name="turn" type="hinge"/><joint name="slide"')


def variant(**attributes: Any) -> Task:
    task: Task = type("Variant", (Slider,), attributes)()
    return task


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"model": SLIDER.replace('<motor joint="slide"/>', "")}, "the model has no actuators"),
        ({"joints": ("slider",)}, 'there is no joint "slider"\n  did you mean slide?'),
        (
            {"model": TWO_JOINTS, "joints": ("turn",)},
            'joint "turn" has no actuator\n  add one to the MJCF; joints with',
        ),
        ({"policies": {"policy": ("slid",)}}, "policies name the joints slid, and joints slide"),
        ({"joints": ("slide", "slide")}, 'joints name "slide" twice'),
        ({"policies": {"critic": ("slide",)}}, 'a policy has the name "critic"\n  rename it'),
        (
            {"policies": {"policy": ("slide",), "critic": ("slide",)}},
            "policies name the joints slide, slide, and joints",
        ),
        ({"policies": {"cart": ("slide",)}}, "obs_groups does not name the groups that cart reads"),
        ({"control_s": 0.025}, "control_s = 0.025 is not a multiple of the timestep of 0.01 s\n  control_s = 0.02 is"),
        ({"control_s": 0.001}, "control_s = 0.001 is not a multiple of the timestep of 0.01 s\n  control_s = 0.01 is"),
        ({"model": "<mujoco><wordbody/></mujoco>"}, "the model cannot be compiled: "),
        ({"model": "nowhere.xml"}, "the model cannot be compiled: "),
        ({"episode_s": 0.01}, "episode_s = 0.01 is less than a control step of 0.04 s"),
    ],
)
def test_models_that_do_not_fit_the_task_are_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_model(variant(**attributes))
    assert str(caught.value).startswith(f"robot.task: {message}")


def test_a_factor_of_the_timestep_must_divide_the_control_step() -> None:
    assert check_model(Slider(), timestep=0.5).opt.timestep == 0.005
    with pytest.raises(UserError, match=r"not a multiple of the timestep of 0\.007 s"):
        check_model(Slider(), timestep=0.7)


USER_TASK = """
from tests.slider import Slider

class Cart(Slider):
    model = "models/cart.xml"
    {line}

class NoModel:
    pass
"""


@pytest.fixture
def user_task(tmp_path: Path) -> Any:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/cart.xml").write_text(SLIDER)

    def write(line: str = "") -> str:
        (tmp_path / "cart.py").write_text(USER_TASK.format(line=line))
        return f"{tmp_path}/cart.py:Cart"

    return write


def test_a_user_task_has_its_model_beside_it(user_task: Any, monkeypatch: Any, tmp_path: Path) -> None:
    task = open_task(user_task())
    monkeypatch.chdir("/")
    assert check_model(task).joint(0).name == "slide"


@pytest.mark.parametrize(
    ("line", "keys", "message"),
    [
        ('joints = ("slid",)', {}, 'there is no joint "slid"'),
        ("control_s = 0.033", {}, "control_s = 0.033 is not a multiple"),
        ('obs_groups = {"policy": ("plicy",), "critic": ("policy",)}', {}, "did you mean policy?"),
        ("", {"policy": ["plicy"]}, "did you mean policy?"),
        ("", {"actor": ["plicy"]}, "did you mean policy?"),
        ("", {"polic": ["policy"]}, "did you mean policy?"),
    ],
)
def test_mistakes_are_found_before_a_run(user_task: Any, line: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_robot_stage("control", spec_of(user_task(line), keys))


def test_an_exception_of_a_task_is_an_error_with_its_place(user_task: Any) -> None:
    line = "advance = lambda self, worlds: {0: 0, 1: 0}[int(worlds.steps[0])]"
    robot = RobotConfig(task=user_task(line)).model_dump(mode="json")
    groups: dict[str, tuple[str, ...]] = {"policy": ("policy",), "critic": ("policy",)}
    simulations = Simulations([SimulationSetup(robot=robot, obs_groups=groups, activation="elu")])
    simulations.load(1, pack(linear_weights([0, 0], 0)))
    key = ChunkKey(seed=0, purpose="test", shard=0, iteration=0)
    with pytest.raises(UserError, match="KeyError: 2") as caught:
        simulations.run(1, [ChunkRequest(key=key, steps=3)])
    assert "cart.py, line 6" in str(caught.value)


def test_a_user_task_must_be_a_task(user_task: Any) -> None:
    name = user_task().replace(":Cart", ":NoModel")
    with pytest.raises(UserError, match="is not a subclass of"):
        open_task(name)


@pytest.mark.parametrize("task", TASKS)
def test_built_in_tasks_pass_the_checks(task: str) -> None:
    check_robot_stage("control", spec_of(task, {}))


def spec_of(task: str, obs_groups: dict[str, Any]) -> Any:
    return RunSpec.model_validate({"robot": {"task": task}, "control": {"obs_groups": obs_groups}})


class Rig:
    """C MuJoCo's worlds of the slider."""

    def __init__(self, worlds: int = 3) -> None:
        self.engine = MujocoWorlds(check_model(Slider()), worlds)
        self.physics = self.engine.start(worlds)

    def speeds(self, **factors: float) -> Any:
        """After 0.04 s with 1 N; the factors are those of world 1."""
        nominal = {name: np.ones(3) for name in PARAMETERS}
        for name, factor in factors.items():
            nominal[name][1] = factor
        self.engine.set_parameters(np.arange(3), nominal)
        return self.engine.step(self.physics, np.ones((3, 4, 1)))[:, 2]


@pytest.mark.parametrize(
    ("factors", "speed"), [({}, 0.04), ({"mass": 2.0}, 0.02), ({"gains": 1.5}, 0.06), ({"inertia": 3.0}, 0.04)]
)
def test_parameters_change_one_world_only(factors: dict[str, float], speed: float) -> None:
    rig = Rig()
    before = rig.speeds()
    np.testing.assert_allclose(rig.speeds(**factors), [0.04, speed, 0.04], rtol=1e-12)
    np.testing.assert_array_equal(rig.speeds(), before)  # and can be taken back


def test_actuators_are_found_by_their_joint() -> None:
    model = check_model(variant(model=TWO_JOINTS))
    assert [actuator_of(model, joint) for joint in ("slide", "turn")] == [0, -1]
