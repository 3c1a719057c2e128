"""The stage `bundle`: the files that a robot's computer needs, and the evidence that the policy may run there.

Nothing is left without a passed twin of this very policy and a met deadline: the files are written into a hidden
folder, which gets its name last.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.load import PREFIX
from tidemill.config.robot import RandomiseConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import GuardStop, UserError
from tidemill.robots import check_deadline
from tidemill.robots.deployment import TOLERANCE, deploy_description, golden_vectors, leapp_description, onnx_metadata
from tidemill.robots.matching import matched_policy, policy_digest, privileged_groups, setup_with
from tidemill.robots.policy_folder import PolicyDescription, StoredPolicy
from tidemill.robots.setup import build
from tidemill.robots.tasks import open_task
from tidemill.telemetry.jsonl import disk_error, write_json
from tidemill.telemetry.run_dir import read_json

DEPLOY, GOLDEN, TWIN, LATENCY = "deploy.json", "golden.json", "twin.json", "latency.json"
SUMS, LEAPP = "SHA256SUMS", "policy.leapp.yaml"


def write_bundle(spec: RunSpec, *, digest: str, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Write the bundle, whole or not at all.

    Args:
        digest: of the stage; in the latency report.

    Returns:
        `product`, `headline` and `figures`. `figures["digest"]` identifies the files without the latency report:
        `grep -v latency.json SHA256SUMS | sha256sum`.

    Raises:
        UserError: the policy cannot be read, does not fit the task or reads what a robot cannot measure; the folder
            holds something else, or cannot be written.
        GuardStop: the twin of this policy has not passed, or the deadline is missed.
    """
    config = spec.bundle
    policy = matched_policy(spec, config.policy, where="bundle.policy")
    check_bundle(spec, policy.description)
    to = config.path or spec.directory / "bundle"
    partial = to.with_name(f".{to.name}.partial")
    if to.exists() and "policy" not in read_json(to / DEPLOY):
        what, hint = "this folder exists and is no bundle", "name a new folder, or move this one away"
        raise UserError(what, where=f"bundle.path = {to}", hint=hint)
    try:
        report = passed_twin(spec)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_files(spec, policy, report, partial)
        progress(f"measuring {config.decisions} decisions")
        latency = check_deadline.measure(
            partial, decisions=config.decisions, deadline_ms=config.deadline_ms, own_time=True
        )
        if not latency["met"]:
            raise GuardStop(
                f"no bundle: 99.9 % of decisions take up to {latency['cpu_p99_9_ms']:.3g} ms of CPU time, the deadline "
                f"is {config.deadline_ms:g} ms\n  raise bundle.deadline_ms, or control.actor_hidden_dims smaller"
            )
        write_json(partial / LATENCY, latency | {"stage": digest})
        files = sorted(partial.iterdir())
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
        (partial / SUMS).write_text("".join(sums))
        if to.exists():
            shutil.rmtree(to)
        partial.rename(to)
    except OSError as error:
        raise disk_error(error, to) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    identity = "".join(line for line in sums if LATENCY not in line)
    figures = {name: latency[name] for name in ("p50_ms", "p99_ms", "p99_9_ms", "cpu_p99_9_ms")}
    return {
        "product": to,
        "headline": f"p99.9 {latency['cpu_p99_9_ms']:.3f} ms of CPU, deadline {config.deadline_ms:g} ms",
        "figures": figures | {"digest": hashlib.sha256(identity.encode()).hexdigest()},
    }


def check_bundle(spec: RunSpec, trained: PolicyDescription | None = None) -> None:
    """
    Args:
        trained: the policy of an earlier stage; None: it is on disk, or not known yet.

    Raises:
        UserError: no twin or policy is named, the deadline is longer than a control step, or the policy does not fit
            the task or reads privileged groups.
    """
    config, task = spec.bundle, open_task(spec.robot.task)
    if config.twin is None:
        hint = 'write bundle.twin = "stage:NAME" of a twin stage of this policy'
        raise UserError("a bundle needs a twin", where="bundle.twin", hint=hint)
    if str(config.policy).endswith(".onnx"):
        hint = "name the folder of a trained policy"
        raise UserError(f"{config.policy} is no folder", where="bundle.policy", hint=hint)
    control_ms = 1e3 * task.control_s
    if config.deadline_ms > control_ms:
        what = f"{config.deadline_ms:g} ms is longer than the control step of {control_ms:g} ms"
        raise UserError(what, where="bundle.deadline_ms", hint="write less, usually a tenth of the control step")
    if trained is None and not str(config.policy).startswith(PREFIX):
        trained = matched_policy(spec, config.policy, where="bundle.policy").description
    groups = privileged_groups(task.obs_groups, trained.obs_groups) if trained is not None else set()
    if groups:
        what = f"the policy reads {', '.join(sorted(groups))}, which only the critic may: a robot cannot measure it"
        hint = "train without it in control.obs_groups, or distill the policy: clone.teacher with clone.on_policy"
        raise UserError(what, where="bundle.policy", hint=hint)


def passed_twin(spec: RunSpec) -> dict[str, Any]:
    """The report of the policy's twin. Raises GuardStop: it is of another policy, or has not passed."""
    path = Path(str(spec.bundle.twin))
    report = read_json(path)
    if report.get("policy") != policy_digest(Path(str(spec.bundle.policy))):
        cause = f"{path} is the report of another policy" if report else f"there is no report {path}"
        raise GuardStop(f"no bundle: {cause}\n  run a twin stage of this policy, and name it in bundle.twin")
    if report["passed"] is not True:
        reasons = "; ".join(report["reasons"][:3])
        hint = "train with robot.randomise of what it fails at, or change the thresholds of the twin"
        raise GuardStop(f"no bundle: the twin has not passed: {reasons}\n  {hint}")
    return report


def _write_files(spec: RunSpec, policy: StoredPolicy, report: Mapping[str, Any], folder: Path) -> None:
    """Everything but the latency report and the checksums."""
    from tidemill.models.actor_onnx import actor_of, write_actor

    described = policy.description
    setup = setup_with(described, spec.robot, engine="mujoco", randomise=RandomiseConfig())
    simulation = build(msgspec.structs.replace(setup, worlds=1))
    digest = policy_digest(Path(str(spec.bundle.policy)))
    deploy = deploy_description(spec.bundle, policy, simulation, digest=digest)
    for name in described.policies:
        actor = actor_of(policy.weights, name, described.activation)
        write_actor(folder / f"{name}.onnx", actor, onnx_metadata(described, name, deploy))
    golden = golden_vectors(policy, simulation)
    (folder / LEAPP).write_text(leapp_description(described, deploy, folder))
    for name, document in ((DEPLOY, deploy), (GOLDEN, golden), (TWIN, report)):
        write_json(folder / name, document)
    shutil.copyfile(check_deadline.__file__, folder / "check_deadline.py")
    difference = check_deadline.largest_difference(check_deadline.Controller(folder), golden)
    if not difference <= TOLERANCE:
        raise GuardStop(f"no bundle: the exported actions differ by {difference:.1e} from those in the simulation")
