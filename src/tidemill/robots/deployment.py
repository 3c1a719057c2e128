"""What a robot's computer needs to know about a policy: `deploy.json`, golden vectors, and the LEAPP description."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tidemill.config.robot import BundleConfig
from tidemill.core.chunks import ChunkKey, ChunkRequest
from tidemill.core.errors import UserError
from tidemill.robots.engine import actuator_of, check_model
from tidemill.robots.matching import joint_terms
from tidemill.robots.policy_arrays import unpack
from tidemill.robots.policy_folder import DESCRIBED, JOINTS, PolicyDescription, StoredPolicy, metadata_lists
from tidemill.robots.simulation import Simulation
from tidemill.robots.task import Floats, Task

if TYPE_CHECKING:
    import mujoco

GOLDEN_STEPS = 16
TOLERANCE = 1e-5
"""Of the actions of another runtime."""
EXPORTED = {"joint_stiffness": "kp", "joint_damping": "kd", "default_joint_pos": "default", "action_scale": "scale"}
"""Metadata of ONNX files with a value for each joint, and its name in `deploy.json`."""
SMALL = 1 / 64  # an action at which no target is at its limit
FAR = 1e6  # an action at which every target is, if it has one


def deploy_description(
    config: BundleConfig, policy: StoredPolicy, simulation: Simulation, *, digest: str
) -> dict[str, Any]:
    """What `deploy.json` has; `robots/check_deadline.py` shows how a runtime uses it.

    Raises:
        UserError: targets are not a scale times the action plus an offset for each joint.
    """
    described, task, model = policy.description, simulation.task, simulation.engine.model
    terms = joint_terms(simulation)
    joints = _joints(task, model)
    kp, kd = ([joint[key] for joint in joints] for key in ("kp", "kd"))
    pose = [joint["default"] if joint["actuator"] == "position" else 0.0 for joint in joints]
    none = [0.0] * len(joints)
    targets, safe_kp, safe_kd = {"hold": (pose, kp, kd), "damp": (none, none, kd), "zero": (none, none, none)}[
        config.safe_action
    ]
    policies = {}
    for name, moved in described.policies.items():
        groups = []
        for group in described.obs_groups[name]:
            named = [
                {"name": term, "width": width, "joints": terms[group].get(term)}
                for term, width in described.layout[group]
            ]
            groups.append({"group": group, "terms": named})
        policies[name] = {"file": f"{name}.onnx", "joints": moved, "observations": groups}
    return {
        "format": 1,
        "task": described.task,
        "policy": digest,
        "control_hz": 1 / described.control_s,
        "deadline_ms": config.deadline_ms,
        "max_observation_age_ms": config.max_observation_age_ms,
        "history": described.history,
        "joints": joints,
        "policies": policies,
        "safe_action": {"kind": config.safe_action, "targets": targets, "kp": safe_kp, "kd": safe_kd},
    }


def onnx_metadata(described: PolicyDescription, name: str, deploy: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of an ONNX file, with the keys of Isaac Lab's and mjlab's exporters and the description as JSON."""
    named = {joint["name"]: joint for joint in deploy["joints"]}
    joints = [named[joint] for joint in described.policies[name]]
    columns = {key: ",".join(f"{joint[each]:g}" for joint in joints) for key, each in EXPORTED.items()}
    terms = [term for group in described.obs_groups[name] for term, _ in described.layout[group]]
    names = {"joint_names": ",".join(described.policies[name]), "observation_names": ",".join(terms)}
    policy = msgspec.json.encode(msgspec.structs.replace(described, parameters={}, returns=None)).decode()
    return names | columns | {"tidemill": policy}


def check_exported(path: Path, task: Task, *, where: str) -> None:
    """Raises UserError: an ONNX file of another program names another scale, default pose or gain than the task has."""
    metadata = metadata_lists(path)
    given = {key: metadata[key] for key in EXPORTED if key in metadata and DESCRIBED not in metadata}
    joints = {joint["name"]: joint for joint in _joints(task, check_model(task))} if given else {}
    for key, texts in given.items():
        texts = texts * len(metadata[JOINTS]) if key == "action_scale" and len(texts) == 1 else texts  # one for all
        if len(texts) != len(metadata[JOINTS]):
            what = f"{key} in {path} has {len(texts)} values, and {JOINTS} {len(metadata[JOINTS])}"
            raise UserError(what, where=where, hint="export one value for each joint")
        for name, text, value in zip(metadata[JOINTS], texts, np.atleast_1d(np.genfromtxt(texts)), strict=True):
            joint, own = joints[name], joints[name][EXPORTED[key]]
            other = {"joint_damping": own + joint["damping"], "default_joint_pos": joint["offset"]}.get(key, own)
            if not np.isclose([own, other], value, rtol=0.01, atol=0.5e-3).any():  # of three decimals
                what = f"{key} of the joint {name} is {text} in {path}, and {own:.4g} in the task"
                raise UserError(what, where=where, hint="correct the task, or train with its values and export again")


def golden_vectors(policy: StoredPolicy, simulation: Simulation) -> dict[str, Any]:
    """The first steps of an episode: observations by term, what the policies read, their actions, and the targets."""
    described = policy.description
    key = ChunkKey(seed=0, purpose="golden", shard=0, iteration=0)
    request = ChunkRequest(key=key, steps=GOLDEN_STEPS, deterministic=True)
    experience = unpack(simulation.run(policy.weights, request).experience)
    windows = {group: experience[f"obs/{group}"][0] for groups in described.obs_groups.values() for group in groups}
    actions = experience["actions"][0, :GOLDEN_STEPS].astype(np.float64)
    targets = _targets(simulation.task, simulation.engine.model, actions)
    steps = []
    for at in range(GOLDEN_STEPS):
        observations = {}
        for group, rows in sorted(windows.items()):
            widths = dict(described.layout[group])
            newest = rows[at, -sum(widths.values()) :]
            parts = np.split(newest, np.cumsum(list(widths.values()))[:-1])
            observations[group] = {term: part.tolist() for term, part in zip(widths, parts, strict=True)}
        inputs = {
            name: np.concatenate([windows[group][at] for group in groups]).tolist()
            for name, groups in described.obs_groups.items()
        }
        actual = {"actions": actions[at].tolist(), "targets": targets[at].tolist()}
        steps.append({"observations": observations, "inputs": inputs} | actual)
    return {"tolerance": TOLERANCE, "steps": steps}


def leapp_description(described: PolicyDescription, deploy: Mapping[str, Any], folder: Path) -> str:
    """The pipeline in the format of LEAPP 0.7, as YAML: one node for each policy.

    Args:
        folder: of the ONNX files.
    """
    models = {}
    for name, moved in described.policies.items():
        content = (folder / f"{name}.onnx").read_bytes()
        columns = [
            f"{group['group']}/{term['name']}/{part}/{age}"
            for group in deploy["policies"][name]["observations"]
            for age in reversed(range(described.history))
            for term in group["terms"]
            for part in term["joints"] or range(term["width"])
        ]
        models[name] = {
            "inputs": [_tensor("observations", columns)],
            "outputs": [_tensor("actions", list(moved))],  # without a kind: deploy.json has the scales to targets
            "parameters": {
                "model_path": f"{name}.onnx",
                "md5sum": hashlib.md5(content, usedforsecurity=False).hexdigest(),
                "sha256sum": hashlib.sha256(content).hexdigest(),
                "backend": "onnx",
                "warp_segments": 0,
                "opset_version": 18,
            },
        }
    pipeline = {
        "data_flow": {},
        "feedback_flow": {},
        "inputs": {name: ["observations"] for name in models},
        "outputs": {name: ["actions"] for name in models},
        "configs": {"frequency": deploy["control_hz"]},
    }
    versions = {"leapp config version": "1.3", "leapp version": "0.7.2"}  # whose format this is
    document = {"models": models, "pipeline": pipeline, "system information": versions}
    return msgspec.yaml.encode(document).decode()


def _tensor(name: str, columns: list[str]) -> dict[str, Any]:
    shape = [1, len(columns)]
    return {"name": name, "dtype": "float32", "shape": shape, "type": "tensor", "element_names": [None, columns]}


def _joints(task: Task, model: mujoco.MjModel) -> list[dict[str, Any]]:
    """Scale, offset and limits of each joint's targets, and its actuator."""
    columns = zip(*(each.tolist() for each in _affine(task, model)), strict=True)
    return [
        {"name": name, "scale": scale, "offset": offset, "lowest": lowest, "highest": highest} | _actuator(model, name)
        for name, (scale, offset, lowest, highest) in zip(task.joints, columns, strict=True)
    ]


def _affine(task: Task, model: mujoco.MjModel) -> tuple[Floats, Floats, Floats, Floats]:
    """Scale, offset, lowest and highest target of each joint."""
    n = len(task.joints)
    offset = _targets(task, model, np.zeros((1, n)))[0]
    scale = (_targets(task, model, np.full((1, n), SMALL))[0] - offset) / SMALL
    ends = np.sort([_targets(task, model, np.full((1, n), end))[0] for end in (-FAR, FAR)], axis=0)
    actions = np.random.default_rng(0).uniform(-2, 2, (64, n))
    difference = np.abs(_targets(task, model, actions) - np.clip(offset + scale * actions, *ends))
    if difference.max() > 1e-6 * np.abs(scale).max():
        what = "the task's controls are not a scale times the action plus an offset for each joint"
        hint = "write such controls: deploy.json and the metadata of an ONNX file cannot describe others"
        raise UserError(what, where="robot.task", hint=hint)
    return scale, offset, ends[0], ends[1]


def _targets(task: Task, model: mujoco.MjModel, actions: Floats) -> Floats:
    """Targets [N, joints] in units of the joints: controls within their limits, through gain and gear."""
    at = [actuator_of(model, joint) for joint in task.joints]
    unlimited = ~model.actuator_ctrllimited[at].astype(bool)
    lowest, highest = model.actuator_ctrlrange[at].T
    controls = np.clip(
        task.controls(actions), np.where(unlimited, -np.inf, lowest), np.where(unlimited, np.inf, highest)
    )
    described = [_actuator(model, joint) for joint in task.joints]
    stiffness = [{"position": each["kp"], "velocity": each["kd"], "force": 1.0}[each["actuator"]] for each in described]
    return np.asarray(controls * model.actuator_gainprm[at, 0] * model.actuator_gear[at, 0] / stiffness)


def _actuator(model: mujoco.MjModel, joint: str) -> dict[str, Any]:
    """Gains and limits of the actuator of a joint. MuJoCo: force = gear × (gain × control + bias · (1, length, speed)),
    with length and speed gear × those of the joint.

    The force for a target is, of position kp × (target - position) - kd × speed, of velocity kd × (target - speed),
    of force target - kd × speed.
    """
    at, named = actuator_of(model, joint), model.joint(joint)
    gain, bias, gear = model.actuator_gainprm[at, 0], model.actuator_biasprm[at], model.actuator_gear[at, 0]
    limits = np.sort(gear * model.actuator_forcerange[at]).tolist() if model.actuator_forcelimited[at] else None
    home = model.key("home").qpos if "home" in [model.key(key).name for key in range(model.nkey)] else model.qpos0
    is_velocity = gain == -bias[2] and gain > 0
    return {
        "actuator": "position" if bias[1] else "velocity" if is_velocity else "force",
        "kp": 0.0 - float(bias[1] * gear**2),
        "kd": 0.0 - float(bias[2] * gear**2),
        "force_range": limits,
        "damping": float(model.dof_damping[named.dofadr[0]]),
        "armature": float(model.dof_armature[named.dofadr[0]]),
        "default": float(home[named.qposadr[0]]),
    }
