"""Checks of a robot's stage before anything runs."""

from __future__ import annotations

from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
from tidemill.robots.engine import check_model
from tidemill.robots.tasks import open_task


def check_robot_stage(kind: StageKind, spec: RunSpec) -> None:
    """Raises UserError: the task, its model or a setting of the stage cannot be used."""
    if not spec.robot.environment:
        check_model(open_task(spec.robot.task), spec.robot.parameters)
    if kind == "clone":
        from tidemill.jobs.clone import check_clone

        check_clone(spec)
    elif kind == "identify":
        from tidemill.jobs.identify import check_identify

        check_identify(spec)
    elif kind == "optimise":
        from tidemill.jobs.optimise import check_optimise

        check_optimise(spec)
