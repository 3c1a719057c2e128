"""Checks of a robot's stage before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tidemill.config.load import PREFIX
from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
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
    if spec.robot.environment:
        check_environment(spec.robot)
    else:
        describe(spec)
    if "newton" in (spec.robot.engine, spec.twin.engine if kind == "twin" else ""):
        check_warp()
    if kind == "twin":
        from tidemill.jobs.twin import check_twin

        check_twin(spec, _trained_by(spec.twin.policy, stages or {}))
    if kind == "bundle":
        from tidemill.jobs.bundle import check_bundle

        check_bundle(spec, _trained_by(spec.bundle.policy, stages or {}))


def _trained_by(policy: Path | None, stages: Mapping[str, RunSpec]) -> PolicyDescription | None:
    """The policy of an earlier stage."""
    stage = stages.get(str(policy).removeprefix(PREFIX)) if str(policy).startswith(PREFIX) else None
    return describe(stage) if stage is not None and not stage.robot.environment else None
