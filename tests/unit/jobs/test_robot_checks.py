"""What a dry run knows about the transfer of a policy that an earlier stage trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.planted_robots import recipe
from tidemill.config.pipeline import StageKind
from tidemill.core.errors import UserError
from tidemill.jobs.robot_checks import check_robot_stage

QUADRUPED = {"task": "quadruped", "history": 1}
TWIN, BUNDLE = {"policy": "stage:train"}, {"policy": "stage:train", "twin": "stage:check"}


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"precision": "bf16"}, {"shards": 2}])
def test_control_policies_are_trained_on_the_cpu(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"trainer.{next(iter(settings))}: .* is not supported"):
        check_robot_stage("control", recipe(tmp_path, runtime="ray", trainer=settings))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("stage:train", ""), ("stage:other", "stage:check runs the policy stage:other, .* stage:train")],
)
def test_twin_of_another_policy_is_refused(policy: str, expected: str, tmp_path: Path) -> None:
    trained = recipe(tmp_path)
    stages = {"train": trained, "other": trained, "check": recipe(tmp_path, twin={"policy": policy})}
    if not expected:
        check_robot_stage("bundle", recipe(tmp_path, bundle=BUNDLE), stages)
        return
    with pytest.raises(UserError, match=expected) as raised:
        check_robot_stage("bundle", recipe(tmp_path, bundle=BUNDLE), stages)
    assert (raised.value.exit_code, raised.value.hint) == (2, "name a twin stage of this policy, or bundle that policy")


@pytest.mark.parametrize(
    ("kind", "training", "stage", "expected"),
    [
        ("twin", {}, {"twin": TWIN | {"engine": "mujoco"}}, "the twin would repeat its evaluation"),
        ("twin", {}, {"twin": TWIN | {"engine": "mujoco"}, "robot": {"parameters": "stage:identified"}}, ""),
        ("twin", {}, {"twin": TWIN}, ""),
        ("twin", {"robot": {"task": "quadruped"}}, {"twin": TWIN}, "moves the joint FL_hip"),
        ("bundle", {}, {"bundle": BUNDLE}, ""),
        (
            "bundle",
            {"robot": QUADRUPED, "control": {"obs_groups": {"policy": ["policy", "privileged"]}}},
            {"robot": QUADRUPED, "bundle": BUNDLE},
            "the policy reads privileged",
        ),
    ],
)
def test_policy_of_an_earlier_stage_is_checked_by_its_description(
    kind: StageKind, training: dict[str, Any], stage: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    stages = {"train": recipe(tmp_path, **training)}
    if not expected:
        check_robot_stage(kind, recipe(tmp_path, **stage), stages)
        return
    with pytest.raises(UserError, match=expected):
        check_robot_stage(kind, recipe(tmp_path, **stage), stages)
