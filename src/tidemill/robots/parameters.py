"""Physical parameters by name, such as `mass:pole`: what `identify` estimates and `robot.parameters` replaces.

mass:BODY         kg, with the rotational inertia in proportion
length:BODY       m, of the longest geom of the body along its axis; what is attached to the body moves with it
damping:JOINT     N s/m or N m s/rad
friction:GEOM     sliding friction
gain:ACTUATOR     force for a control of 1; for position servos also their stiffness and damping in proportion
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from tidemill.config.keys import did_you_mean
from tidemill.core.errors import UserError
from tidemill.core.records import decode_json
from tidemill.robots.engine import known_name

KINDS = {"mass": "body", "length": "body", "damping": "joint", "friction": "geom", "gain": "actuator"}
"""What each kind of parameter belongs to."""
ROUND = (int(mujoco.mjtGeom.mjGEOM_CAPSULE), int(mujoco.mjtGeom.mjGEOM_CYLINDER))
"""Geoms with sizes (radius, half length) and the axis z."""
PARALLEL = 0.99  # cosine of two axes


def read_parameters(path: Path) -> dict[str, float]:
    """Values by name from the result of an `identify` stage.

    Raises:
        UserError: it is not such a file.
    """
    try:
        found = decode_json(path.read_bytes(), dict)["parameters"]
        return {str(name): float(each["value"] if isinstance(each, dict) else each) for name, each in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what, hint = f"{path} holds no parameters ({error})", "name the output of an identify stage"
        raise UserError(what, where="robot.parameters", hint=hint) from error


def check_names(names: Iterable[str], model: mujoco.MjModel, *, where: str) -> None:
    """Raises UserError: a parameter is of no known kind, or names nothing in the model."""
    counts = {"body": model.nbody, "joint": model.njnt, "geom": model.ngeom, "actuator": model.nu}
    for name in names:
        kind, _, part = name.partition(":")
        if kind not in KINDS or not part:
            hint = did_you_mean(kind, KINDS) or f"write {', '.join(f'{each}:{KINDS[each].upper()}' for each in KINDS)}"
            raise UserError(f"{name} is not a parameter", where=where, hint=hint)
        owner = KINDS[kind]
        parts = [str(getattr(model, owner)(at).name) for at in range(counts[owner])]
        known_name(part, (each for each in parts if each != "world"), owner, where=where)


def nominal_value(model: mujoco.MjModel, name: str) -> float:
    """The value of a parameter in a compiled model."""
    kind, _, part = name.partition(":")
    match kind:
        case "mass":
            return float(model.body(part).mass[0])
        case "damping":
            return float(model.dof_damping[model.joint(part).dofadr[0]])
        case "friction":
            return float(model.geom(part).friction[0])
        case "gain":
            return float(model.actuator(part).gainprm[0])
    geom = _longest_geom(model, part)
    return 0.0 if geom is None else 2 * _half_length(model, geom)


def model_spec(source: str) -> mujoco.MjSpec:
    """The editable form of an MJCF file or text."""
    if source.lstrip().startswith("<"):
        return mujoco.MjSpec.from_string(source)
    return mujoco.MjSpec.from_file(source)


def with_parameters(source: str, model: mujoco.MjModel, values: Mapping[str, float], *, where: str) -> mujoco.MjModel:
    """A model of the MJCF `source` with other values. Raises UserError: a name is unknown."""
    check_names(values, model, where=where)
    return apply_parameters(model_spec(source), model, values)


def mjcf_with(source: str, parameters: Path | None) -> str:
    """MJCF, a file or its text, with the values of a file of parameters."""
    if parameters is None:
        return source
    spec = model_spec(source)
    apply_parameters(spec, model_spec(source).compile(), read_parameters(parameters))
    return str(spec.to_xml())


def apply_parameters(spec: mujoco.MjSpec, model: mujoco.MjModel, values: Mapping[str, float]) -> mujoco.MjModel:
    """A model with other values of some parameters.

    Args:
        spec: of the model; it is changed.
        model: compiled from the spec.
    """
    masses = {name: value for name, value in values.items() if name.startswith("mass:")}
    for name, value in values.items():
        kind, _, part = name.partition(":")
        if kind == "length":
            _stretch(spec.body(part), model, value / nominal_value(model, name))
            mass = f"mass:{part}"  # the density of a geom would change it
            masses.setdefault(mass, nominal_value(model, mass))
        elif kind == "damping":
            spec.joint(part).damping[0] = value
        elif kind == "friction":
            spec.geom(part).friction[0] = value
        elif kind == "gain":
            ratio = value / nominal_value(model, name)
            actuator = spec.actuator(part)
            actuator.gainprm[0] *= ratio
            actuator.biasprm[1:3] *= ratio
    changed = spec.compile()
    for name, value in masses.items():
        body, ratio = spec.body(name.partition(":")[2]), value / nominal_value(changed, name)
        body.mass *= ratio  # of an explicit inertia; otherwise it comes from the geoms
        body.inertia *= ratio
        body.fullinertia *= ratio
        for geom in body.geoms:
            geom.mass *= ratio  # not a number: the density counts
            geom.density *= ratio
    return spec.compile() if masses else changed


def _longest_geom(model: mujoco.MjModel, body: str) -> int | None:
    """The geom that has the length of a body; None if the body has no geom."""
    first, count = int(model.body(body).geomadr[0]), int(model.body(body).geomnum[0])
    return max(range(first, first + count), key=lambda geom: _half_length(model, geom), default=None)


def _half_length(model: mujoco.MjModel, geom: int) -> float:
    return float(model.geom_size[geom][_long_axis(model, geom)[0]])


def _long_axis(model: mujoco.MjModel, geom: int) -> tuple[int, npt.NDArray[np.float64]]:
    """Where a geom's half length is in its size, and its direction in the frame of the body."""
    at = axis = int(np.argmax(model.geom_size[geom]))
    if int(model.geom_type[geom]) in ROUND:
        at, axis = 1, 2
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
    return at, rotation.reshape(3, 3)[:, axis]


def _stretch(body: Any, model: mujoco.MjModel, ratio: float) -> None:
    """Move and lengthen what belongs to a body along the axis of its longest geom."""
    longest = _longest_geom(model, body.name)
    if longest is None:
        return
    _, axis = _long_axis(model, longest)
    stretch = np.eye(3) + (ratio - 1) * np.outer(axis, axis)
    for geom, compiled in zip(body.geoms, range(int(model.body(body.name).geomadr[0]), model.ngeom), strict=False):
        at, direction = _long_axis(model, compiled)
        if np.isfinite(geom.fromto[0]):
            geom.fromto[:] = np.concatenate([stretch @ geom.fromto[:3], stretch @ geom.fromto[3:]])
            continue
        geom.pos[:] = stretch @ geom.pos
        if abs(direction @ axis) > PARALLEL:
            geom.size[at] *= ratio
    for part in (*body.bodies, *body.joints, *body.sites):
        part.pos[:] = stretch @ part.pos
    if body.explicitinertial:
        body.ipos[:] = stretch @ body.ipos
        body.inertia *= ratio**2
