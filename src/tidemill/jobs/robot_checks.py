"""Checks of a robot's stage before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tidemill.config.learning import TrainerConfig
from tidemill.config.load import PREFIX
from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.robots.engine import check_warp
from tidemill.robots.policy_folder import PolicyDescription
from tidemill.robots.setup import describe
from tidemill.robots.vecenv import check_environment


def check_robot_stage(kind: StageKind, spec: RunSpec, stages: Mapping[str, RunSpec] | None = None) -> None:
    """
    Args:
        stages: all stages of the pipeline by name: a policy that one of them trains is checked by its description.

    Raises:
        UserError: the task, its model or a setting of the stage cannot be used.
    """
    if kind in ("control", "clone"):
        _check_trainer(spec.trainer)
    given = spec.robot.parameters
    trained = (stages or {}).get(str(spec.twin.policy).removeprefix(PREFIX))
    is_identified = str(given).startswith(PREFIX) and (trained is None or trained.robot.parameters != given)
    spec = _before_identification(spec)
    if spec.robot.environment:
        check_environment(spec.robot)
        if kind not in ("control", "clone"):
            what = f"{kind} needs a model, which an environment does not show"
            raise UserError(what, where="robot.environment", hint="name a robot.task with an MJCF file")
    else:
        describe(spec)
    if "newton" in (spec.robot.engine, spec.twin.engine if kind == "twin" else ""):
        check_warp()
    if kind == "clone":
        from tidemill.jobs.clone import check_clone

        check_clone(spec)
    elif kind == "identify":
        from tidemill.jobs.identify import check_identify

        check_identify(spec)
    elif kind == "optimise":
        from tidemill.jobs.optimise import check_optimise

        check_optimise(spec)
    elif kind == "twin":
        from tidemill.jobs.twin import check_twin

        check_twin(spec, _trained_by(spec.twin.policy, stages or {}), is_identified=is_identified)
    elif kind == "bundle":
        from tidemill.jobs.bundle import check_bundle

        check_bundle(spec, _trained_by(spec.bundle.policy, stages or {}))
        twin = (stages or {}).get(str(spec.bundle.twin).removeprefix(PREFIX))
        if twin is not None and twin.twin.policy != spec.bundle.policy:
            what = f"{spec.bundle.twin} runs the policy {twin.twin.policy}, the bundle has {spec.bundle.policy}"
            raise UserError(what, where="bundle.twin", hint="name a twin stage of this policy, or bundle that policy")


def _check_trainer(trainer: TrainerConfig) -> None:
    """Raises UserError: the trainer is not one thread pool of this machine's CPU."""
    for key, works in {"device": ("auto", "cpu"), "precision": ("auto", "fp32"), "shards": (1,)}.items():
        if (value := getattr(trainer, key)) not in works:
            what = f"{value} is not supported: control policies are trained in this process, on the CPU, in fp32"
            raise UserError(what, where=f"trainer.{key}", hint=f"leave trainer.{key} out")


def _before_identification(spec: RunSpec) -> RunSpec:
    """Without parameters of a stage that has not run yet."""
    if not str(spec.robot.parameters).startswith(PREFIX):
        return spec
    return spec.model_copy(update={"robot": spec.robot.model_copy(update={"parameters": None})})


def _trained_by(policy: Path | None, stages: Mapping[str, RunSpec]) -> PolicyDescription | None:
    """The policy of an earlier stage."""
    stage = stages.get(str(policy).removeprefix(PREFIX)) if str(policy).startswith(PREFIX) else None
    return describe(_before_identification(stage)) if stage is not None and not stage.robot.environment else None
