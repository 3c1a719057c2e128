"""The stage `twin`: cells, thresholds, resuming, and policies from ONNX files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from pydantic import ValidationError

from tests.planted_robots import POLICY, recipe
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs import twin
from tidemill.jobs.stopping import StopRequest
from tidemill.jobs.twin import check_twin, run_twin
from tidemill.robots.episodes import PlayedEpisodes
from tidemill.robots.matching import matched_policy, policy_digest
from tidemill.robots.setup import describe

EXPORTED = {
    "joint_names": "slide",
    "action_scale": "9.95",  # of 10 N
    "default_joint_pos": "0.000",
    "joint_stiffness": "0.000",
    "joint_damping": "0.000",
}
"""Metadata as Isaac Lab's exporters write it, of a policy of the task."""


def _played(success: int, fell: int) -> PlayedEpisodes:
    """64 episodes."""
    counts = {"success": success, "fell": fell}
    figures = {name: np.arange(64) < count for name, count in counts.items()}
    return PlayedEpisodes(figures={**figures, "return": np.ones(64), "figure/speed": np.full(64, 0.5)}, chunks=())


def _spec(folder: Path, **settings: Any) -> RunSpec:
    return recipe(folder, twin={"policy": str(POLICY), "engine": "mujoco"} | settings)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, PlayedEpisodes]:
    """Episodes by cell; a cell is removed when it is played."""
    results: dict[str, PlayedEpisodes] = {}

    async def play(*_: Any, purpose: str, **__: Any) -> PlayedEpisodes:
        return results.pop(purpose.removeprefix("twin:"))

    monkeypatch.setattr(twin, "play_episodes", play)
    return results


def test_thresholds_apply_to_wilson_bounds_of_required_cells(
    tmp_path: Path, results: dict[str, PlayedEpisodes]
) -> None:
    # 95 % Wilson bounds of 64: 63 successes are at least 0.917, 62 at least 0.893; 2 falls are at most 0.107.
    results |= {"nominal": _played(63, 1), "mass=0.8": _played(62, 0), "mass=1.2": _played(64, 2)}
    outcome = run_twin(_spec(tmp_path, mass=[0.8, 1.2]))
    report = json.loads(outcome["product"].read_text())
    assert outcome["figures"]["passed"] is report["passed"] is False
    assert [cell["passed"] for cell in report["cells"]] == [True, False, False]
    assert report["reasons"] == [
        "mass=0.8: success 0.969, at least 0.893, is below 0.9",
        "mass=1.2: falls 0.031, at most 0.107, are above 0.1",
    ]
    assert [point["value"] for point in report["sensitivity"]["mass"]] == [0.8, 1.0, 1.2]
    assert report["policy"] == policy_digest(POLICY)
    outcome = run_twin(_spec(tmp_path, mass=[0.8, 1.2], required="nominal"))
    assert outcome["figures"]["passed"] is True


def test_finished_cells_are_kept_until_their_policy_or_settings_change(
    tmp_path: Path, results: dict[str, PlayedEpisodes]
) -> None:
    results |= {"nominal": _played(64, 0)}
    with pytest.raises(KeyError, match=r"mass=1\.2"):  # killed in the second cell
        run_twin(_spec(tmp_path, mass=[1.2]))
    results |= {"mass=1.2": _played(64, 0)}
    assert run_twin(_spec(tmp_path, mass=[1.2]))["figures"]["passed"] is True
    with pytest.raises(KeyError, match="nominal"):
        run_twin(_spec(tmp_path, mass=[1.2], episodes=128))


def test_request_to_stop_interrupts(tmp_path: Path, results: dict[str, PlayedEpisodes]) -> None:
    stop = StopRequest()
    stop.request("test")
    assert run_twin(_spec(tmp_path, mass=[1.2]), stop=stop) == {"interrupted": True}
    assert not (tmp_path / "twin.json").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"policy": None}, r"twin\.policy: no policy is named"),
        ({"engine": "mujoco"}, r"trained in mujoco with these parameters.*\n.*newton"),
        ({"policy": "missing"}, "holds no trained policy"),
        ({"policy": "missing.onnx"}, "cannot be read"),
        ({"timestep": [3.0]}, r"not a multiple of the timestep of 0\.03 s"),
    ],
)
def test_unusable_twins_are_refused_before_they_run(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        check_twin(_spec(tmp_path, **settings))


@pytest.mark.parametrize("axis", [{"mass": [-1.0]}, {"gains": [0.0]}, {"timestep": [0.0]}, {"delay_s": [-0.1]}])
def test_factors_are_positive_and_delays_not_negative(axis: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="greater than"):
        _spec(tmp_path, **axis)


def test_twin_with_the_identified_parameters_of_the_training_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "parameters.json"
    file.write_text('{"parameters": {"mass:pole": 0.12}}')
    robot = {"parameters": str(file)}
    trained = describe(recipe(tmp_path, robot=robot))
    spec = recipe(tmp_path, robot=robot, twin={"policy": "stage:train", "engine": "mujoco"})
    with pytest.raises(UserError, match="trained in mujoco with these parameters"):
        check_twin(spec, trained)
    check_twin(spec, msgspec.structs.replace(trained, parameters={}))


def test_terms_of_an_onnx_file_are_matched_by_name(tmp_path: Path) -> None:
    names = {"joint_names": "slide", "observation_names": "velocities,pole_direction,cart_position"}
    file = _onnx_file(tmp_path / "policy.onnx", 10, names)
    weights = matched_policy(_spec(tmp_path), file, where="twin.policy").weights
    assert weights["policy.columns"].tolist() == [3, 4, 0, 1, 2, 8, 9, 5, 6, 7]


def test_policy_of_an_earlier_stage_is_not_checked_yet(tmp_path: Path) -> None:
    check_twin(_spec(tmp_path, policy="stage:train"))


def _onnx_file(path: Path, width: int, metadata: dict[str, str]) -> Path:
    """Actions are the first observation, for a batch of one."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["obs", "first"], ["actions"], axis=1)],
        "policy",
        [helper.make_tensor_value_info("obs", TensorProto.FLOAT, [1, width])],
        [helper.make_tensor_value_info("actions", TensorProto.FLOAT, [1, 1])],
        [helper.make_tensor("first", TensorProto.INT64, [1], [0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("width", "metadata", "expected"),
    [
        (10, {}, r'does not name its joints\n.*joint_names = "slide"'),
        (10, {"joint_names": "slidee"}, r"moves the joint slidee.*\n.*did you mean slide\?"),
        (5, {"joint_names": "slide"}, "reads 5 numbers"),
        (10, {"joint_names": "slide", "observation_names": "pole_directoin"}, r"pole_directoin.*\n.*pole_direction\?"),
        (10, EXPORTED | {"action_scale": "9.8"}, r"action_scale of the joint slide is 9\.8 .*, and 10 in the task\n"),
        (
            10,
            EXPORTED | {"default_joint_pos": "0.1"},
            r"default_joint_pos of the joint slide is 0\.1 .*, and 0 in the task",
        ),
        (
            10,
            EXPORTED | {"joint_stiffness": "35.000"},
            r"joint_stiffness of the joint slide is 35\.000 .*, and 0",
        ),
        (10, EXPORTED | {"joint_damping": "low"}, r"joint_damping of the joint slide is low .*, and 0 in the task"),
        (10, EXPORTED | {"joint_damping": "0,0"}, "joint_damping in .* has 2 values, and joint_names 1"),
    ],
)
def test_onnx_file_that_does_not_fit_is_refused(
    width: int, metadata: dict[str, str], expected: str, tmp_path: Path
) -> None:
    policy = _onnx_file(tmp_path / "policy.onnx", width, metadata)
    with pytest.raises(UserError, match=expected):
        check_twin(_spec(tmp_path, policy=str(policy)))


def test_onnx_file_of_another_program_plays(tmp_path: Path) -> None:
    policy = _onnx_file(tmp_path / "policy.onnx", 10, EXPORTED)
    report = json.loads(run_twin(_spec(tmp_path, policy=str(policy)))["product"].read_text())
    assert report["passed"] is False  # a force in the direction of the pole's sine does not swing it up
    assert report["cells"][0]["episodes"] == 64
    assert report["trained_in"] == ""
