"""Running the stages of robots: one function for each kind."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.config.pipeline import StageKind, subject
from tidemill.config.schema import RunSpec
from tidemill.core.formatting import counted
from tidemill.pipeline.job import Job, Outcome
from tidemill.telemetry.manifest import build_manifest
from tidemill.telemetry.report import write_report
from tidemill.telemetry.run_dir import RunDirectory

ROBOT_KINDS: tuple[StageKind, ...] = ("control", "clone", "optimise", "identify", "twin", "bundle")


def run_control(job: Job) -> Outcome:
    """Train a policy in simulation; outputs the last checkpoint."""
    from tidemill.jobs.control import train_control

    return _trained(train_control(job.spec, callbacks=job.callbacks, stop=job.stop))


def run_clone(job: Job) -> Outcome:
    """Imitate recorded episodes or a teacher; outputs the policy."""
    from tidemill.jobs.clone import clone_policy

    return _trained(clone_policy(job.spec, callbacks=job.callbacks, stop=job.stop))


def run_optimise(job: Job) -> Outcome:
    """Optimise a trajectory by gradients; outputs a file of controls."""
    from tidemill.jobs.optimise import optimise_trajectory

    return _written(optimise_trajectory(job.spec, progress=job.progress))


def run_identify(job: Job) -> Outcome:
    """Identify parameters from logs; outputs a file of values and intervals."""
    from tidemill.jobs.identify import identify_parameters

    return _written(identify_parameters(job.spec, progress=job.progress))


def run_twin(job: Job) -> Outcome:
    """Run a policy in the twin; outputs its report."""
    from tidemill.jobs.twin import run_twin

    outcome = _written(run_twin(job.spec, progress=job.progress, stop=job.stop))
    if not outcome.interrupted:
        _write_page(job)
    return outcome


def run_bundle(job: Job) -> Outcome:
    """Write the files for a robot's computer; outputs their folder."""
    from tidemill.jobs.bundle import write_bundle

    return _written(write_bundle(job.spec, digest=job.digest, progress=job.progress))


def _trained(summary: Mapping[str, Any]) -> Outcome:
    """Of a stage that trains: `policy` is the folder of the policy, `figures` what it achieves."""
    if summary["interrupted"]:
        return Outcome(interrupted=True)
    headline, figures = str(summary["headline"]), dict(summary["figures"])
    return Outcome(product=Path(summary["policy"]), headline=headline, figures=figures, wall_s=summary["wall_s"])


def _written(found: Mapping[str, Any]) -> Outcome:
    """Of a stage that writes a file or folder: `product`, `headline`, `figures`."""
    if found.get("interrupted"):
        return Outcome(interrupted=True)
    return Outcome(product=Path(found["product"]), headline=str(found["headline"]), figures=dict(found["figures"]))


def _write_page(job: Job) -> None:
    """Write the page of a stage that does not train."""
    spec = job.spec
    with RunDirectory.open(job.directory) as run:
        names = {"run": spec.run.name, "model": subject(job.kind, spec)}
        manifest = build_manifest(run.read_manifest(), **names, seed=spec.run.seed, unix_s=time.time())
        run.write_manifest(manifest | {"kind": job.kind})
        write_report(run.path)


def robot_stage_size(kind: StageKind, spec: RunSpec) -> str:
    """The amount of work, as far as the configuration determines it."""
    if kind in ("control", "clone"):
        experience = spec.trainer.steps * spec.robot.worlds * spec.control.num_steps_per_env
        if kind == "clone" and not spec.clone.on_policy:
            return counted(spec.clone.epochs, "epoch")
        return f"{counted(spec.trainer.steps, 'iteration')}, {experience:,} control steps"
    if kind == "optimise":
        return counted(spec.optimise.iterations, "gradient step")
    if kind == "twin":
        return f"{counted(len(spec.twin.cells), 'cell')} × {counted(spec.twin.episodes, 'episode')}"
    if kind == "identify":
        return counted(len(spec.identify.parameters), "parameter")
    return counted(spec.bundle.decisions, "decision")
