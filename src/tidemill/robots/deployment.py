"""What a robot's computer needs to know about a policy: `deploy.json`, golden vectors, and the LEAPP description."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tidemill.config.robot import BundleConfig
from tidemill.core.chunks import ChunkKey, ChunkRequest
from tidemill.core.errors import UserError
from tidemill.robots.engine import actuator_of
from tidemill.robots.matching import joint_terms
from tidemill.robots.policy_arrays import unpack
from tidemill.robots.policy_folder import PolicyDescription, StoredPolicy
from tidemill.robots.simulation import Simulation
from tidemill.robots.task import Floats, Task

if TYPE_CHECKING:
    import mujoco

GOLDEN_STEPS = 16
TOLERANCE = 1e-5
"""Of the actions of another runtime."""
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
    scale, offset, lowest, highest = _affine(task, model)
    terms = joint_terms(simulation)
    joints = []
    for at, name in enumerate(task.joints):
        limits = {"lowest": float(lowest[at]), "highest": float(highest[at])}
        scales = {"scale": float(scale[at]), "offset": float(offset[at])}
        joints.append({"name": name, **scales, **limits, **_actuator(model, name)})
    position = np.array([joint["actuator"] == "position" for joint in joints])
    kp, kd = ([joint[key] for joint in joints] for key in ("kp", "kd"))
    none = [0.0] * len(joints)
    safe = {
        "hold": {
            "targets": np.where(position, [joint["default"] for joint in joints], 0.0).tolist(),
            "kp": kp,
            "kd": kd,
        },
        "damp": {"targets": none, "kp": none, "kd": kd},
        "zero": {"targets": none, "kp": none, "kd": none},
    }
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
        "safe_action": {"kind": config.safe_action, **safe[config.safe_action]},
    }


def onnx_metadata(policy: StoredPolicy, name: str, deploy: Mapping[str, Any], described: str) -> dict[str, str]:
    """Metadata of an ONNX file, with the keys of Isaac Lab's and mjlab's exporters.

    Args:
        described: the description of the policy as JSON.
    """
    named = {joint["name"]: joint for joint in deploy["joints"]}
    joints = [named[joint] for joint in policy.description.policies[name]]
    keys = {"joint_stiffness": "kp", "joint_damping": "kd", "default_joint_pos": "default", "action_scale": "scale"}
    columns = {key: ",".join(f"{joint[each]:g}" for joint in joints) for key, each in keys.items()}
    terms = [term for group in policy.description.obs_groups[name] for term, _ in policy.description.layout[group]]
    names = {"joint_names": ",".join(policy.description.policies[name]), "observation_names": ",".join(terms)}
    return names | columns | {"tidemill": described}


def golden_vectors(policy: StoredPolicy, simulation: Simulation) -> dict[str, Any]:
    """The first steps of an episode: observations by term, what the policies read, their actions, and the targets."""
    described, task = policy.description, simulation.task
    key = ChunkKey(seed=0, purpose="golden", shard=0, iteration=0)
    request = ChunkRequest(key=key, steps=GOLDEN_STEPS, deterministic=True)
    experience = unpack(simulation.run(policy.weights, request).experience)
    steps = []
    for at in range(GOLDEN_STEPS):
        observations: dict[str, dict[str, list[float]]] = {}
        for group in {group for groups in described.obs_groups.values() for group in groups}:
            start = experience[f"obs/{group}"].shape[2] // described.history * (described.history - 1)
            observations[group] = {}
            for term, width in described.layout[group]:
                observations[group][term] = experience[f"obs/{group}"][0, at, start : start + width].tolist()
                start += width
        inputs = {
            name: np.concatenate([experience[f"obs/{group}"][0, at] for group in groups]).tolist()
            for name, groups in described.obs_groups.items()
        }
        actions = experience["actions"][0, at].astype(np.float64)
        targets = _targets(task, simulation.engine.model, actions[None])[0]
        steps.append(
            {
                "observations": dict(sorted(observations.items())),
                "inputs": inputs,
                "actions": actions.tolist(),
                "targets": targets.tolist(),
            }
        )
    return {"tolerance": TOLERANCE, "steps": steps}


def leapp_description(described: PolicyDescription, deploy: Mapping[str, Any], files: Mapping[str, bytes]) -> str:
    """The pipeline in the format of LEAPP 0.7, as YAML: one node for each policy.

    Args:
        files: content of the ONNX file of each policy.
    """
    models = {}
    for name, content in files.items():
        moved = described.policies[name]
        columns = []
        for group in deploy["policies"][name]["observations"]:
            for age in reversed(range(described.history)):
                for term in group["terms"]:
                    parts = term["joints"] or range(term["width"])
                    columns += [f"{group['group']}/{term['name']}/{part}/{age}" for part in parts]
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
        "inputs": {name: ["observations"] for name in files},
        "outputs": {name: ["actions"] for name in files},
        "configs": {"frequency": deploy["control_hz"]},
    }
    versions = {"leapp config version": "1.3", "leapp version": importlib.metadata.version("leapp")}
    document = {"models": models, "pipeline": pipeline, "system information": versions}
    return msgspec.yaml.encode(document).decode()


def _tensor(name: str, columns: list[str]) -> dict[str, Any]:
    shape = [1, len(columns)]
    return {"name": name, "dtype": "float32", "shape": shape, "type": "tensor", "element_names": [None, columns]}


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
        hint = "deploy.json cannot describe others: write such controls, or deploy by your own means"
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
