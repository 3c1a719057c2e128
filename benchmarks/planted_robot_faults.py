"""Mistakes of transfer, planted in copies of a policy, in the twin and in the bundle: which are refused?

    python -m benchmarks.planted_robot_faults [POLICY ...] [--engine newton]

A POLICY is the folder of a trained policy, such as the last checkpoint of `tidemill train @robot --only=train`; the
default is that of the tests. A fault is refused by names, by the twin's thresholds, or by golden vectors. Controls
change as much, but nothing that matters, and must be accepted. Exit code 1: a fault was accepted, or a control refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from tests.planted_robots import POLICY
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs.bundle import write_bundle
from tidemill.jobs.twin import run_twin
from tidemill.models.actor_onnx import actor_of, write_actor
from tidemill.robots.check_deadline import Controller, damaged, largest_difference
from tidemill.robots.policy_folder import StoredPolicy, read_policy, write_policy

ACCEPTED = "accepted"
Overrides = dict[str, Any]
Plant = Callable[[StoredPolicy], StoredPolicy | Overrides]


# Changes of a policy.


def _described(policy: StoredPolicy, **changes: Any) -> StoredPolicy:
    return StoredPolicy(description=msgspec.structs.replace(policy.description, **changes), weights=policy.weights)


def _weighted(policy: StoredPolicy, change: Callable[[str, Any], Any]) -> StoredPolicy:
    weights = {name: np.asarray(change(name, each.copy()), np.float32) for name, each in policy.weights.items()}
    return StoredPolicy(description=policy.description, weights=weights)


def _last_layer(policy: StoredPolicy) -> str:
    return max(name.split(".")[2] for name in policy.weights if ".layers." in name)


def unknown_joint(policy: StoredPolicy) -> StoredPolicy:
    first = policy.description.joints[0]
    joints = (f"{first}x", *policy.description.joints[1:])
    return _described(policy, joints=joints, policies=dict.fromkeys(policy.description.policies, joints))


def permuted_joints(policy: StoredPolicy) -> StoredPolicy:
    """The first half of the joints has the names of the second half."""
    joints = policy.description.joints
    permuted = (*joints[len(joints) // 2 :], *joints[: len(joints) // 2])
    return _described(policy, joints=permuted, policies=dict.fromkeys(policy.description.policies, permuted))


def missing_normaliser(policy: StoredPolicy) -> StoredPolicy:
    neutral = {"normaliser.mean": 0.0, "normaliser.variance": 1.0}

    def change(name: str, values: Any) -> Any:
        return np.full_like(values, neutral.get(name.split(".", 1)[1], values))

    return _weighted(policy, change)


def sign(policy: StoredPolicy) -> StoredPolicy:
    last = f".layers.{_last_layer(policy)}."
    return _weighted(policy, lambda name, values: -values if last in name else values)


def wrong_scale(policy: StoredPolicy) -> StoredPolicy:
    """Observations in radians for a policy that reads degrees."""
    return _weighted(policy, lambda name, values: values / 57.3 if name.endswith("layers.0.weight") else values)


def _swapped_layout(policy: StoredPolicy) -> dict[str, Any]:
    """The layout with two terms of equal width exchanged, the last two such."""
    layout = dict(policy.description.layout)
    group = next(iter(policy.description.obs_groups.values()))[0]
    terms = list(layout[group])
    one, other = next((a, b) for b in reversed(range(len(terms))) for a in range(b) if terms[a][1] == terms[b][1])
    terms[one], terms[other] = terms[other], terms[one]
    return layout | {group: tuple(terms)}


def swapped_terms(policy: StoredPolicy) -> StoredPolicy:
    return _described(policy, layout=_swapped_layout(policy))


def missing_history(policy: StoredPolicy) -> StoredPolicy:
    return _described(policy, history=policy.description.history + 1)


def wrong_rate(policy: StoredPolicy) -> StoredPolicy:
    return _described(policy, control_s=policy.description.control_s / 2)


def reordered_by_name(policy: StoredPolicy) -> StoredPolicy:
    """A control: terms in another order, with their columns."""
    layout, described = _swapped_layout(policy), policy.description
    (group,) = next(iter(described.obs_groups.values()))
    widths = dict(described.layout[group])
    ends = dict(zip(widths, np.cumsum(list(widths.values())), strict=True))
    frame = np.concatenate([np.arange(ends[term] - width, ends[term]) for term, width in layout[group]])
    columns = np.concatenate([frame + age * sum(widths.values()) for age in range(described.history)])
    inputs = ("normaliser.mean", "normaliser.variance", "layers.0.weight")
    moved = _weighted(policy, lambda name, values: values[..., columns] if name.endswith(inputs) else values)
    return _described(moved, layout=layout)


def unchanged(policy: StoredPolicy) -> StoredPolicy:
    return policy


def cell(**axes: float) -> Plant:
    return lambda policy: {name: [value] for name, value in axes.items()}


FAULTS: dict[str, Plant] = {
    "unknown joint": unknown_joint,
    "permuted joints": permuted_joints,
    "missing normaliser": missing_normaliser,
    "wrong rate": wrong_rate,
    "gain x 10": cell(gains=10.0),
    "sign of the action": sign,
    "stale observations": cell(delay_s=0.1),
    "swapped observation terms": swapped_terms,
    "wrong scale of observations": wrong_scale,
    "missing history": missing_history,
}
CONTROLS: dict[str, Plant] = {
    "unchanged": unchanged,
    "terms reordered with their columns": reordered_by_name,
    "mass x 0.9": cell(mass=0.9),
    "mass x 1.1": cell(mass=1.1),
    "gains x 0.9": cell(gains=0.9),
    "friction x 0.8": cell(friction=0.8),
    "half the timestep": cell(timestep=0.5),
    "delay of 5 ms": cell(delay_s=0.005),
}


# Changes of a bundle; checksums are made again, as by somebody who edits it.


def deploy_changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        file = folder / "deploy.json"
        deploy = json.loads(file.read_text())
        change(deploy)
        file.write_text(json.dumps(deploy))

    return plant


def other_network(folder: Path) -> None:
    """The ONNX file of the policy before its last update."""
    import onnx

    for file in folder.glob("*.onnx"):
        model = onnx.load(file)
        for each in model.graph.initializer:
            values = onnx.numpy_helper.to_array(each)
            each.CopyFrom(onnx.numpy_helper.from_array(np.asarray(values * 1.01, values.dtype), each.name))
        onnx.save(model, file)


BUNDLE_FAULTS: dict[str, Callable[[Path], None]] = {
    "wrong scale of actions": deploy_changed(lambda deploy: [j.update(scale=2 * j["scale"]) for j in deploy["joints"]]),
    "permuted joints of deploy.json": deploy_changed(
        lambda deploy: [each["joints"].reverse() for each in deploy["policies"].values()]
    ),
    "other network": other_network,
    "terms of deploy.json reordered": deploy_changed(
        lambda deploy: [
            group["terms"].reverse() for each in deploy["policies"].values() for group in each["observations"]
        ]
    ),
}
BUNDLE_CONTROLS: dict[str, Callable[[Path], None]] = {
    "copied bundle": lambda folder: None,
    "deploy.json formatted again": deploy_changed(lambda deploy: None),
    "shorter deadline": deploy_changed(lambda deploy: deploy.update(deadline_ms=1.0)),
}


def verdict(policy: Path, plant: Plant, *, work: Path, engine: str = "mujoco", as_onnx: str = "") -> str:
    """`accepted`, or why the twin of a changed policy is refused.

    Args:
        as_onnx: "described" or "foreign": run the policy as an ONNX file with or without Tidemill's description.
    """
    stored = read_policy(policy, where="policy")
    planted = plant(stored)
    twin = planted if isinstance(planted, dict) else {}
    changed = stored if isinstance(planted, dict) else planted
    changed = _described(changed, engine="")  # otherwise a twin in the same engine needs other parameters
    shutil.rmtree(work, ignore_errors=True)
    (work / "policy").mkdir(parents=True)
    write_policy(work / "policy", changed.description, changed.weights)
    path = work / "policy"
    if as_onnx:
        path = work / "policy.onnx"
        (name,) = changed.description.policies
        metadata = {"joint_names": ",".join(changed.description.joints)}
        if as_onnx == "described":
            metadata["tidemill"] = msgspec.json.encode(changed.description).decode()
        write_actor(path, actor_of(changed.weights, name, changed.description.activation), metadata)
    robot = {"task": stored.description.task, "history": stored.description.history}
    sections = {"run": {"dir": str(work)}, "robot": robot}
    spec = RunSpec.model_validate(sections | {"twin": {"policy": str(path), "engine": engine} | twin})
    try:
        run_twin(spec)
    except UserError as error:
        return str(error)
    report = json.loads((work / "twin.json").read_text())
    return ACCEPTED if report["passed"] else str(report["reasons"][0])


def bundle_of(policy: Path, *, work: Path, task: str, decisions: int = 500) -> Path:
    """The bundle of an unchanged policy, whose twin is in `work`."""
    bundle = {
        "policy": str(policy),
        "twin": str(work / "twin.json"),
        "decisions": decisions,
        "path": str(work / "bundle"),
    }
    spec = RunSpec.model_validate({"run": {"dir": str(work)}, "robot": {"task": task}, "bundle": bundle})
    write_bundle(spec, digest="planted")
    return work / "bundle"


def bundle_verdict(bundle: Path, plant: Callable[[Path], None], *, work: Path) -> str:
    """`accepted`, or how the check on the robot's computer refuses a changed bundle."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(bundle, work)
    plant(work)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(work.glob("*.*"))]
    (work / "SHA256SUMS").write_text("\n".join(sums))
    if names := damaged(work):
        return f"damaged: {', '.join(names)}"
    golden = json.loads((work / "golden.json").read_text())
    try:
        difference = largest_difference(Controller(work), golden)
    except Exception as error:  # noqa: BLE001 -- of onnxruntime
        return f"golden vectors: {error}"
    return ACCEPTED if difference <= golden["tolerance"] else f"golden vectors differ by {difference:.1e}"


def run(policy: Path, *, engine: str, work: Path) -> Mapping[str, tuple[bool, str]]:
    """The verdict of every case, and whether it should be accepted."""
    found: dict[str, tuple[bool, str]] = {}
    described = read_policy(policy, where="policy").description
    for wanted, cases in ((False, FAULTS), (True, CONTROLS)):
        for name, plant in cases.items():
            if name.startswith("permuted") and len(described.joints) == 1:
                continue
            found[name] = (wanted, verdict(policy, plant, work=work / "case", engine=engine))
    for kind in ("described", "foreign"):
        found[f"ONNX, {kind}"] = (True, verdict(policy, unchanged, work=work / "case", engine=engine, as_onnx=kind))
    verdict(policy, unchanged, work=work / "case", engine=engine)
    bundle = bundle_of(work / "case" / "policy", work=work / "case", task=described.task)
    for wanted, planted in ((False, BUNDLE_FAULTS), (True, BUNDLE_CONTROLS)):
        for name, change in planted.items():
            if name.startswith("permuted") and len(described.joints) == 1:
                continue
            found[name] = (wanted, bundle_verdict(bundle, change, work=work / "changed"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", type=Path, default=[POLICY])
    parser.add_argument("--engine", choices=["mujoco", "newton"], default="newton")
    given = parsed(parser)
    results = {}
    for policy in given.policies:
        with tempfile.TemporaryDirectory() as folder:
            found = run(policy, engine=given.engine, work=Path(folder))
        results[read_policy(policy, where="policy").description.task] = _judged(found)
    content = {"engine": given.engine, "tasks": results}
    write_result("planted_robot_faults", content)
    return exit_code(content)


def _judged(found: Mapping[str, tuple[bool, str]]) -> dict[str, Any]:
    """The cases and their counts, which are also printed."""
    cases: list[dict[str, Any]] = [
        {"case": name, "kind": "control" if wanted else "fault", "reached": (reason == ACCEPTED) == wanted}
        | {"verdict": reason.splitlines()[0]}
        for name, (wanted, reason) in found.items()
    ]
    for case in cases:
        print(f"{'ok' if case['reached'] else 'WRONG':5s} {case['kind']:7s} {case['case']:36s} {case['verdict']}")
    counts = {}
    for kind, done in (("fault", "refused"), ("control", "accepted")):
        reached = [case["reached"] for case in cases if case["kind"] == kind]
        counts[f"{kind}s {done}"] = f"{sum(reached)} of {len(reached)}"
        print(f"{kind}s {done}: {counts[f'{kind}s {done}']}")
    return {**counts, "cases": cases}


if __name__ == "__main__":
    sys.exit(main())
