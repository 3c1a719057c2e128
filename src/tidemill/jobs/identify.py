"""Identify physical parameters of a robot from logs: the stage `identify`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from tidemill.config.load import PREFIX
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.robots.engine import actuator_of, check_model, known_name, model_source
from tidemill.robots.identification import FIRST_ROWS, Log, LogFit, identify
from tidemill.robots.parameters import check_names, nominal_value
from tidemill.robots.recordings import for_joints, read_recording
from tidemill.robots.task import Task
from tidemill.robots.tasks import open_task
from tidemill.telemetry.jsonl import write_json

RESULT = "parameters.json"
ENDS = ("value", "low", "high")
ANGLE_OR_DISTANCE = (2, 3)  # types of joints with one position: slide and hinge


def check_identify(spec: RunSpec) -> None:
    """Raises UserError: a setting of `identify` cannot be used."""
    settings = spec.identify
    if settings.path is None:
        raise UserError("no logs are given", where="identify.path", hint="name a folder of recorded episodes")
    if not settings.parameters:
        hint = 'name some, such as ["mass:BODY", "damping:JOINT"]'
        raise UserError("no parameters are given", where="identify.parameters", hint=hint)
    task = open_task(spec.robot.task)
    model = check_model(task, spec.robot.parameters)
    check_names(settings.parameters, model, where="identify.parameters")
    for name in settings.parameters:
        if nominal_value(model, name) <= 0:
            what = f"{name} is 0 in the model, and identify.within is a range of factors"
            raise UserError(what, where="identify.parameters", hint="give it a positive value in the MJCF")
    if not str(settings.path).startswith(PREFIX):
        _logs(spec, task, model)


def identify_parameters(spec: RunSpec, *, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Estimate `identify.parameters` and write them with their intervals to `parameters.json`.

    Returns:
        `product`, the path of the file; `headline`; `figures`.

    Raises:
        UserError: a setting or the logs cannot be used.
    """
    check_identify(spec)
    settings, task = spec.identify, open_task(spec.robot.task)
    model = check_model(task, spec.robot.parameters)
    joints, logs = _logs(spec, task, model)
    substeps = round(task.control_s / model.opt.timestep)
    progress(f"fitting {len(settings.parameters)} parameters to {len(logs)} logs")
    fit = LogFit(model_source(task), model, settings.parameters, joints, logs, substeps)
    found = identify(fit, within=settings.within, confidence=settings.confidence, seed=spec.run.seed, joints=joints)
    product = spec.directory / RESULT
    product.parent.mkdir(parents=True, exist_ok=True)
    write_json(product, found)
    figures = {f"{name} {end}": getattr(each, end) for name, each in found.parameters.items() for end in ENDS}
    values = [
        f"{name} {each.value:.4g} ({each.low:.4g} to {each.high:.4g}{', at the end of its range' * each.at_limit})"
        for name, each in found.parameters.items()
    ]
    return {"product": product, "headline": ", ".join(values), "figures": figures}


def _logs(spec: RunSpec, task: Task, model: mujoco.MjModel) -> tuple[list[str], list[Log]]:
    """The measured joints, and the logs of their positions."""
    where = "identify.path"
    recording = read_recording(Path(str(spec.identify.path)), where=where)
    measured, moved = list(recording.description.measured), recording.description.joints
    if "positions" not in recording.tables or not measured or not moved:
        hint = "record `positions`, and name their joints in `measured` and those of the actions in `joints`"
        raise UserError("the logs have no positions of joints, or no names", where=where, hint=hint)
    recording = for_joints(recording, task.joints, task.control_s, rename={}, where="identify")
    known = [model.joint(at).name for at in range(model.njnt) if int(model.jnt_type[at]) in ANGLE_OR_DISTANCE]
    for joint in measured:
        known_name(joint, known, "joint with one position", where=where)
    name = "controls" if "controls" in recording.tables else "actions"
    actuators = [actuator_of(model, joint) for joint in task.joints]
    logs = []
    for positions, rows in zip(recording.episodes("positions"), recording.episodes(name), strict=True):
        values = rows.astype(np.float64)
        controls = np.zeros((len(values), model.nu))
        controls[:, actuators] = values if name == "controls" else task.controls(values)
        logs.append(Log(positions=positions.astype(np.float64), controls=controls))
    logs = [log for log in logs if len(log.positions) > FIRST_ROWS]
    if not logs:
        raise UserError(f"no log has more than {FIRST_ROWS} rows", where=where, hint="record for some seconds")
    return measured, logs
