"""Checks of a robot's stage before anything runs."""

from __future__ import annotations

from tidemill.config.load import PREFIX
from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.robots.setup import describe
from tidemill.robots.vecenv import check_environment


def check_robot_stage(kind: StageKind, spec: RunSpec) -> None:
    """Raises UserError: the task, its model or a setting of the stage cannot be used."""
    if str(spec.robot.parameters).startswith(PREFIX):  # of a stage that has not run yet
        spec = spec.model_copy(update={"robot": spec.robot.model_copy(update={"parameters": None})})
    if spec.robot.environment:
        check_environment(spec.robot)
        if kind in ("identify", "optimise"):
            what = f"{kind} needs a model, which an environment does not show"
            raise UserError(what, where="robot.environment", hint="name a robot.task with an MJCF file")
    else:
        describe(spec)
    if kind == "clone":
        from tidemill.jobs.clone import check_clone

        check_clone(spec)
    elif kind == "identify":
        from tidemill.jobs.identify import check_identify

        check_identify(spec)
    elif kind == "optimise":
        from tidemill.jobs.optimise import check_optimise

        check_optimise(spec)
