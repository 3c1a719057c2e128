"""Checks of a robot's stage before anything runs."""

from __future__ import annotations

from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
from tidemill.robots.engine import check_warp
from tidemill.robots.setup import describe
from tidemill.robots.vecenv import check_environment


def check_robot_stage(kind: StageKind, spec: RunSpec) -> None:
    """Raises UserError: the task, its model or a setting of the stage cannot be used."""
    if spec.robot.environment:
        check_environment(spec.robot)
    else:
        describe(spec)
    if "newton" in (spec.robot.engine, spec.twin.engine if kind == "twin" else ""):
        check_warp()
    if kind == "twin":
        from tidemill.jobs.twin import check_twin

        check_twin(spec)
    if kind == "bundle":
        from tidemill.jobs.bundle import check_bundle

        check_bundle(spec)
