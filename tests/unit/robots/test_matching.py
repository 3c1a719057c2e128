"""Policies are matched to a task by names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.planted_robots import POLICY, recipe
from tidemill.core.errors import UserError
from tidemill.robots.matching import joint_terms, match_policy, policy_digest, privileged_groups
from tidemill.robots.policy_folder import PolicyDescription, read_policy, write_policy
from tidemill.robots.setup import build, describe, setup_of

HIDDEN = 3


def _quadruped(history: int) -> tuple[PolicyDescription, Any]:
    """The description of a quadruped's policy, and the joints of its terms."""
    spec = recipe(Path("runs"), robot={"task": "quadruped", "history": history})
    described = describe(spec)
    groups = {"policy": ("policy",)}
    terms = joint_terms(build(msgspec.structs.replace(setup_of(spec), worlds=1)))
    return msgspec.structs.replace(described, obs_groups=groups), terms


def test_terms_with_a_column_for_each_joint_are_found() -> None:
    described, terms = _quadruped(1)
    per_joint = {name: joints for name, joints in terms["policy"].items() if joints == described.joints}
    assert {"joint_positions", "joint_velocities", "previous_actions"} <= set(per_joint)
    assert not {"gravity", "command"} & set(terms["policy"])


def test_policy_with_other_orders_of_joints_and_terms_acts_the_same(tmp_path: Path) -> None:
    task, terms = _quadruped(2)
    random = np.random.default_rng(0)
    joints = tuple(random.permutation(task.joints).tolist())
    layout = {"policy": tuple(reversed(task.layout["policy"]))}
    other = msgspec.structs.replace(task, joints=joints, policies={"policy": joints}, layout=layout)
    width = other.inputs("policy")
    weights = {
        "policy.normaliser.mean": random.standard_normal(width),
        "policy.normaliser.variance": random.uniform(0.5, 2, width),
        "policy.layers.0.weight": random.standard_normal((HIDDEN, width)),
        "policy.layers.0.bias": random.standard_normal(HIDDEN),
        "policy.layers.1.weight": random.standard_normal((12, HIDDEN)),
        "policy.layers.1.bias": random.standard_normal(12),
        "policy.log_std": random.standard_normal(12),
    }
    singles = {name: values.astype(np.float32) for name, values in weights.items()}
    write_policy(tmp_path, other, singles)

    found = match_policy(tmp_path, task, terms, where="twin.policy")

    named = {term: [f"{term}/{joint}" for joint in task.joints] for term, joints in terms["policy"].items()}

    def columns(description: PolicyDescription) -> list[str]:
        """The name of every number that a policy reads."""
        frame: list[str] = []
        for term, size in description.layout["policy"]:
            parts = description.joints if term in named else range(size)
            frame += [f"{term}/{part}" for part in parts]
        return [f"{name}@{age}" for age in range(2) for name in frame]

    order = [columns(other).index(name) for name in columns(task)]
    np.testing.assert_array_equal(found.weights["policy.layers.0.weight"], singles["policy.layers.0.weight"][:, order])
    np.testing.assert_array_equal(found.weights["policy.normaliser.mean"], singles["policy.normaliser.mean"][order])
    rows = [joints.index(joint) for joint in task.joints]
    np.testing.assert_array_equal(found.weights["policy.layers.1.bias"], singles["policy.layers.1.bias"][rows])
    assert found.description.joints == task.joints


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"joints": ("slied",), "policies": {"policy": ("slied",)}},
            r"moves the joint slied.*\n.*did you mean slide\?",
        ),
        ({"policies": {"policy": ()}}, "does not move the joint slide"),
        ({"policies": {"left": ("slide",)}}, "the task has the policies policy, this one has left"),
        ({"control_s": 0.01}, "acts every 10 ms, the task every 20 ms"),
        ({"obs_groups": {"policy": ("polic",)}}, r"reads the group polic.*\n.*did you mean policy\?"),
        ({"layout": {"policy": (("velocity", 2),)}}, r"reads the term velocity.*\n.*did you mean velocities\?"),
        ({"layout": {"policy": (("velocities", 3),)}}, "reads 3 columns of the term velocities, the task has 2"),
        ({"history": 3}, "do not fit their description"),
    ],
)
def test_names_that_the_task_does_not_have_are_refused(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    stored = read_policy(POLICY, where="")
    write_policy(tmp_path, msgspec.structs.replace(stored.description, **changes), stored.weights)
    spec = recipe(tmp_path)
    with pytest.raises(UserError, match=expected):
        match_policy(tmp_path, describe(spec), joint_terms(build(setup_of(spec))), where="twin.policy")


def test_privileged_groups_are_those_of_the_critic_only() -> None:
    task = {"policy": ("seen",), "critic": ("seen", "exact")}
    assert privileged_groups(task, {"policy": ("seen",), "critic": ("exact",)}) == set()
    assert privileged_groups(task, {"policy": ("seen", "exact")}) == {"exact"}


def test_digest_depends_on_names_and_weights(tmp_path: Path) -> None:
    stored = read_policy(POLICY, where="")
    write_policy(tmp_path, stored.description, stored.weights)
    same = policy_digest(tmp_path)
    write_policy(tmp_path, stored.description, {**stored.weights, "policy.log_std": np.ones(1, np.float32)})
    assert policy_digest(tmp_path) != same
