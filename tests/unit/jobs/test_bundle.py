"""The stage `bundle`: its files, their digest, the check on another computer, and refusals without files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.planted_robot_faults import BUNDLE_FAULTS, bundle_verdict
from tests.planted_robots import POLICY, recipe, twin_file
from tests.slider import SLIDER, Slider, simulate
from tidemill.config.schema import RunSpec
from tidemill.core.errors import GuardStop, TidemillError, UserError
from tidemill.jobs.bundle import write_bundle
from tidemill.models.actor_onnx import actor_of
from tidemill.robots.check_deadline import Controller
from tidemill.robots.deployment import deploy_description
from tidemill.robots.matching import policy_digest
from tidemill.robots.policy_arrays import mean_action
from tidemill.robots.policy_folder import StoredPolicy, read_policy, write_policy
from tidemill.robots.setup import describe
from tidemill.robots.tasks.quadruped import ACTION_SCALE

pytestmark = pytest.mark.xdist_group("bundle")  # one bundle is tested in several ways


def _write(folder: Path, **settings: Any) -> Mapping[str, Any]:
    folder.mkdir(exist_ok=True)
    bundle = {"policy": str(POLICY), "twin": str(twin_file(folder)), "decisions": 200, "deadline_ms": 15.0} | settings
    return write_bundle(recipe(folder, bundle=bundle), digest="0123")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return _write(tmp_path_factory.mktemp("bundle"))


def test_deploy_file_names_joints_observations_and_limits(outcome: Mapping[str, Any]) -> None:
    deploy = json.loads((outcome["product"] / "deploy.json").read_text())
    (joint,) = deploy["joints"]
    assert {name: joint[name] for name in ("name", "actuator", "scale", "offset", "lowest", "highest")} == {
        "name": "slide",
        "actuator": "force",
        "scale": pytest.approx(10),
        "offset": 0,
        "lowest": -10,
        "highest": 10,
    }
    terms = deploy["policies"]["policy"]["observations"][0]["terms"]
    assert [(term["name"], term["width"], term["joints"]) for term in terms] == [
        ("pole_direction", 2, None),
        ("cart_position", 1, ["slide"]),
        ("velocities", 2, ["slide", "hinge"]),
    ]
    assert (deploy["control_hz"], deploy["history"], deploy["max_observation_age_ms"]) == (50, 2, 40)
    assert deploy["safe_action"] == {"kind": "hold", "targets": [0], "kp": [0], "kd": [0]}


def test_actions_are_those_of_torch_and_numpy(outcome: Mapping[str, Any]) -> None:
    import onnxruntime
    import torch

    stored = read_policy(POLICY, where="")
    inputs = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32)
    session = onnxruntime.InferenceSession(outcome["product"] / "policy.onnx")
    (actions,) = session.run(None, {"observations": inputs})
    with torch.no_grad():
        of_torch = actor_of(stored.weights, "policy", "elu")(torch.from_numpy(inputs)).numpy()
    of_numpy = mean_action(stored.weights, "policy", inputs, "elu")
    np.testing.assert_allclose(actions, of_torch, atol=1e-5)
    np.testing.assert_allclose(actions, of_numpy, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["joint_names"] == "slide"


def test_leapp_file_runs_the_policy(outcome: Mapping[str, Any]) -> None:
    """In LEAPP's own runtime, which reads the file's names and checksums."""
    import torch

    leapp = pytest.importorskip("leapp")  # of the tools of development

    pipeline = leapp.InferenceManager(str(outcome["product"] / "policy.leapp.yaml"))
    for step in json.loads((outcome["product"] / "golden.json").read_text())["steps"]:
        found = pipeline({"policy/observations": torch.tensor([step["inputs"]["policy"]])})
        np.testing.assert_allclose(found["policy/actions"].numpy()[0], step["actions"], atol=1e-5)


def test_check_runs_elsewhere_and_finds_damage(outcome: Mapping[str, Any], tmp_path: Path) -> None:
    """In an interpreter that cannot import Tidemill."""
    bundle = outcome["product"]
    command = [sys.executable, "-I", bundle / "check_deadline.py", "--decisions", "100", "--deadline-ms", "1000"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "observations too old: 2 of 2 rejected" in checked.stdout
    missed = subprocess.run([*command[:-1], "1e-6"], capture_output=True, text=True, timeout=60, check=False)
    assert missed.returncode == 1
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in bundle.iterdir():
        (copy / file.name).write_bytes(file.read_bytes().replace(b'"scale": 1', b'"scale": 2'))
    damaged = subprocess.run(
        [*command[:2], copy / "check_deadline.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (damaged.returncode, "damaged: deploy.json" in damaged.stdout) == (1, True)


def test_killed_stage_writes_the_same_bundle(outcome: Mapping[str, Any], tmp_path: Path) -> None:
    partial = tmp_path / ".bundle.partial"  # of the killed process
    partial.mkdir()
    (partial / "policy.onnx").write_bytes(b"half")
    again = _write(tmp_path)
    assert again["figures"]["digest"] == outcome["figures"]["digest"]
    lines = (again["product"] / "SHA256SUMS").read_text().splitlines(keepends=True)
    kept = "".join(line for line in lines if "latency.json" not in line)
    assert hashlib.sha256(kept.encode()).hexdigest() == again["figures"]["digest"]
    assert not partial.exists()


@pytest.mark.parametrize(
    ("report", "settings", "error", "expected"),
    [
        ({"passed": False, "reasons": ["mass=0.8: falls"]}, {}, GuardStop, "the twin has not passed: mass=0.8: falls"),
        ({"policy": "another"}, {}, GuardStop, "report of another policy"),
        ({}, {"twin": "missing.json"}, GuardStop, r"there is no report missing\.json"),
        ({}, {"twin": None}, UserError, "a bundle needs a twin"),
        (
            {},
            {"deadline_ms": 0.0001},
            GuardStop,
            r"decisions take up to [\d.]+ ms of CPU time, the deadline is 0\.0001 ms",
        ),
        ({}, {"deadline_ms": 30.0}, UserError, "longer than the control step of 20 ms"),
    ],
)
def test_no_files_without_a_passed_twin_and_deadline(
    report: dict[str, Any], settings: dict[str, Any], error: type[TidemillError], expected: str, tmp_path: Path
) -> None:
    twin = twin_file(tmp_path, **report)
    with pytest.raises(error, match=expected) as raised:
        _write(tmp_path / "stage", **{"twin": str(twin)} | settings)
    assert raised.value.exit_code == (3 if error is GuardStop else 2)
    assert not list((tmp_path / "stage").glob("*bundle*"))


def _random(folder: Path, groups: tuple[str, ...] = ("policy",)) -> RunSpec:
    """The recipe of a bundle of a random policy, which reads some groups and has a passed twin."""
    robot = {"task": "quadruped", "history": 1}
    described = msgspec.structs.replace(describe(recipe(folder, robot=robot)), obs_groups={"policy": groups})
    width, random, moved = described.inputs("policy"), np.random.default_rng(0), len(described.joints)
    weights = {
        "policy.normaliser.mean": np.zeros(width),
        "policy.normaliser.variance": np.ones(width),
        "policy.normaliser.count": np.ones(()),
        "policy.layers.0.weight": random.normal(0, 0.1, (moved, width)),
        "policy.layers.0.bias": random.normal(0, 0.1, moved),
        "policy.log_std": np.zeros(moved),
    }
    policy = folder / "policy"
    policy.mkdir(parents=True)
    write_policy(policy, described, {name: np.asarray(each, np.float32) for name, each in weights.items()})
    twin = twin_file(folder, policy=policy_digest(policy))
    bundle = {"policy": str(policy), "twin": str(twin), "decisions": 100, "deadline_ms": 15.0}
    return recipe(folder, robot=robot, bundle=bundle)


def test_bundle_of_many_joints_has_their_gains_and_finds_permuted_ones(tmp_path: Path) -> None:
    bundle = write_bundle(_random(tmp_path / "stage"), digest="0123")["product"]
    _check_previous_actions(bundle)
    deploy = json.loads((bundle / "deploy.json").read_text())
    thigh = deploy["joints"][1]
    expected = {"name": "FL_thigh", "actuator": "position", "kp": 35, "kd": 0.8, "default": 0.65}
    assert {name: thigh[name] for name in expected} == expected
    assert (thigh["scale"], thigh["offset"]) == pytest.approx((ACTION_SCALE, 0.65))
    assert deploy["safe_action"]["targets"] == [joint["default"] for joint in deploy["joints"]]
    verdict = bundle_verdict(bundle, BUNDLE_FAULTS["permuted joints of deploy.json"], work=tmp_path / "changed")
    assert verdict.startswith("golden vectors differ")


def _check_previous_actions(bundle: Path) -> None:
    """A robot's loop observes the actions that the controller has kept."""
    controller = Controller(bundle)
    for step in json.loads((bundle / "golden.json").read_text())["steps"]:
        observed = step["observations"]["policy"]
        np.testing.assert_allclose(controller.previous_actions, observed["previous_actions"], atol=1e-5)
        assert controller.decide({"policy": observed}, age_ms=0)[1]
    assert controller.previous_actions.any()
    controller.decide({}, age_ms=1000)
    assert not controller.previous_actions.any()


def test_privileged_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the policy reads privileged, which only the critic may"):
        write_bundle(_random(tmp_path / "stage", groups=("policy", "privileged")), digest="0123")


@pytest.mark.parametrize(
    ("actuator", "expected"),
    [
        ('<motor joint="slide" gear="-3" ctrlrange="-2 5"/>', ("force", -3, -15, 6, 0, 0)),
        ('<velocity joint="slide" kv="20" ctrlrange="-2 2"/>', ("velocity", 1, -2, 2, 0, 20)),
        ('<position joint="slide" kp="8" kv="2" gear="2" ctrlrange="-1 1"/>', ("position", 0.5, -0.5, 0.5, 32, 8)),
    ],
)
def test_servos_are_described_in_units_of_their_joints(
    actuator: str, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Slider, "model", SLIDER.replace('<motor joint="slide"/>', actuator))
    described = msgspec.structs.replace(read_policy(POLICY, where="").description, obs_groups={"policy": ("policy",)})
    policy = StoredPolicy(description=described, weights={})
    config = recipe(tmp_path).bundle
    (joint,) = deploy_description(config, policy, simulate(Slider(), worlds=1), digest="")["joints"]
    assert tuple(joint[key] for key in ("actuator", "scale", "lowest", "highest", "kp", "kd")) == expected
