"""A trained policy for a task, matched by the names of joints, groups and terms: columns that only happen to have the
same number would act on the wrong joints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tidemill.config.keys import did_you_mean
from tidemill.config.robot import RobotConfig
from tidemill.config.schema import RunSpec
from tidemill.core.chunks import ChunkKey
from tidemill.core.errors import UserError
from tidemill.robots.policy_folder import (
    ACTORS,
    DESCRIPTION,
    PolicyDescription,
    StoredPolicy,
    read_onnx,
    read_policy,
)
from tidemill.robots.setup import SimulationSetup, build, describe, setup_of
from tidemill.robots.simulation import Simulation
from tidemill.robots.task import Integers

SLIDE = 2  # mjtJoint: free and ball joints are before it, hinges after it
JointTerms = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Joints by group and term."""


def policy_digest(path: Path) -> str:
    """32 hex digits that identify a policy: of its ONNX file, or of both files in its folder.

    Raises:
        OSError: it is not there.
    """
    files = [path / DESCRIPTION, path / ACTORS] if path.is_dir() else [path]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def joint_terms(simulation: Simulation) -> JointTerms:
    """The terms of every group that have one column for each of some joints, and these joints in order.

    They are found by moving one joint at a time, so that no task must declare them.
    """
    task, model = simulation.task, simulation.engine.model
    state = simulation.start(ChunkKey(seed=0, purpose="layout", shard=0, iteration=0))
    rest = task.observe(simulation.view(state))
    moved = {}
    for joint in (model.joint(at) for at in range(model.njnt) if model.jnt_type[at] >= SLIDE):
        after = {name: values.copy() for name, values in state.items()}
        after["physics"][:, 1 + joint.qposadr[0]] += 0.1
        after["physics"][:, 1 + model.nq + joint.dofadr[0]] += 0.1
        if joint.name in task.joints:
            after["actions"][:, -1, task.joints.index(joint.name)] += 0.1
        moved[joint.name] = task.observe(simulation.view(after))
    found: dict[str, dict[str, tuple[str, ...]]] = {group: {} for group in rest}
    for group, terms in rest.items():
        for term, values in terms.items():
            changed = {name: (each[group][term] != values).any(axis=0) for name, each in moved.items()}
            owners = [[name for name, each in changed.items() if each[at]] for at in range(values.shape[1])]
            names = tuple(name for column in owners for name in column)
            if all(len(column) == 1 for column in owners) and len(set(names)) == len(names):
                found[group][term] = names
    return found


def matched_policy(spec: RunSpec, path: Path | None, *, where: str) -> StoredPolicy:
    """`match_policy` for the task of a run. Raises UserError: no policy is named, or it does not fit the task."""
    if path is None:
        raise UserError("no policy is named", where=where, hint='write "stage:NAME", or the path of a trained policy')
    return match_policy(path, describe(spec), terms_of(spec), where=where)


def terms_of(spec: RunSpec) -> JointTerms:
    """`joint_terms` of the task of a run; {}: an environment does not tell."""
    if spec.robot.environment:
        return {}
    setup = setup_of(spec)
    return joint_terms(build(msgspec.structs.replace(setup, robot=setup.robot | {"engine": "mujoco"}, worlds=1)))


def setup_with(policy: PolicyDescription, robot: RobotConfig, **changes: Any) -> SimulationSetup:
    """The simulation in which a policy acts, with changes of the robot."""
    config = robot.model_copy(update={"history": policy.history} | changes)
    groups = {name: policy.obs_groups[name] for name in policy.policies}
    return SimulationSetup(robot=config.model_dump(mode="json"), obs_groups=groups, activation=policy.activation)


def match_policy(path: Path, task: PolicyDescription, terms: JointTerms, *, where: str) -> StoredPolicy:
    """Read a policy and reorder what it reads and returns, so that it acts in the task.

    Args:
        task: the task's joints, policies and layout; see `setup.describe`.
        terms: see `joint_terms`.

    Returns:
        The policy with the task's order of joints. Its `engine`, `history` and `activation` are those of its training.

    Raises:
        UserError: it is unreadable, or names what the task does not have.
    """
    stored = read_onnx(path, task, where=where) if path.suffix == ".onnx" else read_policy(path, where=where)
    given = stored.description
    check_names(given, task, where)
    weights = dict(stored.weights)
    for name, joints in task.policies.items():
        columns = _columns(given, task, terms, name)
        rows = np.array([given.policies[name].index(joint) for joint in joints])
        width = given.history * sum(width for group in given.obs_groups[name] for _, width in task.layout[group])
        if f"{name}.onnx" in weights:
            weights |= {f"{name}.columns": columns, f"{name}.rows": rows}  # type: ignore[dict-item]
            continue
        try:
            for part, fill in (("normaliser.mean", 0.0), ("normaliser.variance", 1.0), ("layers.0.weight", 0.0)):
                values = weights[f"{name}.{part}"]
                placed = np.full((*values.shape[:-1], width), fill, np.float32)
                placed[..., columns] = values
                weights[f"{name}.{part}"] = placed
            last = sum(key.startswith(f"{name}.layers.") for key in weights) // 2 - 1
            for part in (f"layers.{last}.weight", f"layers.{last}.bias", "log_std"):
                weights[f"{name}.{part}"] = np.ascontiguousarray(weights[f"{name}.{part}"][rows])
        except (KeyError, ValueError, IndexError) as error:
            what = f"the weights of {name} in {path} do not fit their description ({error})"
            raise UserError(what, where=where, hint=f"restore {DESCRIPTION} and {ACTORS} of one checkpoint") from error
    groups = {name: given.obs_groups[name] for name in task.policies}
    description = msgspec.structs.replace(
        given, joints=task.joints, policies=task.policies, obs_groups=groups, layout=task.layout
    )
    return StoredPolicy(description=description, weights=weights)


def privileged_groups(
    task_groups: Mapping[str, tuple[str, ...]], obs_groups: Mapping[str, tuple[str, ...]]
) -> set[str]:
    """The groups that policies read although in the task only the critic does: a robot cannot measure them."""
    measured = {group for name, groups in task_groups.items() if name != "critic" for group in groups}
    return {group for name, groups in obs_groups.items() if name != "critic" for group in groups} - measured


def check_names(given: PolicyDescription, task: PolicyDescription, where: str) -> None:
    """Raises UserError: a policy names joints, groups or terms that the task does not have, or acts at another rate."""
    hint = "name the task that it was trained on"
    if set(given.policies) != set(task.policies):
        what = f"the task has the policies {', '.join(task.policies)}, this one has {', '.join(given.policies)}"
        raise UserError(what, where=where, hint=hint)
    for name, joints in task.policies.items():
        _known(given.policies[name], joints, f"the policy {name} moves the joint", where)
        if missing := [joint for joint in joints if joint not in given.policies[name]]:
            raise UserError(
                f"the policy {name} does not move the joint {missing[0]} of the task", where=where, hint=hint
            )
        _known(given.obs_groups[name], task.layout, f"the policy {name} reads the group", where)
        for group in given.obs_groups[name]:
            terms = dict(task.layout[group])
            _known([term for term, _ in given.layout[group]], terms, f"the policy {name} reads the term", where)
            for term, width in given.layout[group]:
                if width != terms[term]:
                    what = f"the policy {name} reads {width} columns of the term {term}, the task has {terms[term]}"
                    raise UserError(what, where=where, hint=hint)
    if abs(given.control_s - task.control_s) > 1e-9:
        what = f"the policy acts every {1e3 * given.control_s:g} ms, the task every {1e3 * task.control_s:g} ms"
        raise UserError(what, where=where, hint="change control_s of the task, or train the policy again")


def _known(names: Iterable[str], known: Iterable[str], what: str, where: str) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"the task has {', '.join(known)}"
            raise UserError(f"{what} {name}, which the task does not have", where=where, hint=hint)


def _columns(given: PolicyDescription, task: PolicyDescription, terms: JointTerms, name: str) -> Integers:
    """For each number that a policy reads, its column among the observations of the task."""
    found, start = [], 0
    for group in given.obs_groups[name]:
        frame, first = {}, 0
        for term, width in task.layout[group]:
            joints = terms.get(group, {}).get(term, ())
            frame[term] = first + _order(joints, given, task, width)
            first += width
        columns = np.concatenate([frame[term] for term, _ in given.layout[group]])
        found += [start + age * first + columns for age in range(given.history)]
        start += given.history * first
    return np.concatenate(found)


def _order(joints: tuple[str, ...], given: PolicyDescription, task: PolicyDescription, width: int) -> Integers:
    """The order of a term's columns in the policy: terms in the task's order of joints follow the policy's order."""
    if not set(joints) <= set(given.joints) or joints != tuple(sorted(joints, key=task.joints.index)):
        return np.arange(width)
    return np.array([joints.index(joint) for joint in sorted(joints, key=given.joints.index)] or range(width))
