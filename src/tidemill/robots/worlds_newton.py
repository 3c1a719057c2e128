"""Newton's SolverMuJoCo (MuJoCo Warp), on a GPU if there is one: Newton reads the MJCF, and all worlds step together.

State keeps MuJoCo's conventions (quaternions w x y z, velocities of a free body linear in the world and angular in the
body), because the solver's own arrays are stepped instead of Newton's. Arithmetic is float32. On the CPU a state
continues bit-identically in another process and beside another number of worlds, but only together with the solver's
warm start, which is therefore appended to a row of physics.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np
import warp

from tidemill.core.errors import UserError
from tidemill.robots.engine import check_warp
from tidemill.robots.task import Floats, Integers
from tidemill.robots.worlds_mujoco import FACTORS, MujocoWorlds, vary_model

warp.config.log_level = max(warp.config.log_level, 40)  # errors; otherwise each compiled kernel prints a line

import mujoco_warp  # noqa: E402 -- after the level above
import newton  # noqa: E402

GIVEN = (
    *("body_mass", "body_inertia", "body_ipos", "body_iquat", "body_pos"),
    *("dof_damping", "dof_armature", "actuator_gainprm", "actuator_biasprm", "geom_friction"),
)
"""Fields taken from the compiled model: their values may be identified ones, which the MJCF does not have."""
DERIVED = ("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0")
"""Fields that MuJoCo computes from mass and inertia."""


class NewtonWorlds:
    """Implements `robots.engine.Engine`.

    Args:
        model: nominal, of C MuJoCo.
        source: the MJCF that it was compiled from, a path or its text.

    Raises:
        UserError: Newton reads another robot from the MJCF, or Warp's deterministic mode is on.
    """

    def __init__(self, model: mujoco.MjModel, worlds: int, *, source: str) -> None:
        check_warp()
        self.model = model
        self._reference = MujocoWorlds(model, worlds)
        solver = _solver(source, worlds)
        self._warp_model, self._warp_data = solver.mjw_model, solver.mjw_data
        self._warp_model.opt.timestep.fill_(model.opt.timestep)
        self._nominal = solver.mj_model  # of Newton's import: without geoms that touch nothing
        _take_parameters(model, self._nominal)
        self._varied, self._scratch = copy.copy(self._nominal), mujoco.MjData(self._nominal)
        shapes = {name: getattr(self._nominal, name).shape for name in (*GIVEN, *DERIVED)}
        self._fields = {name: np.zeros((worlds, *shape), np.float32) for name, shape in shapes.items()}
        self._factors = np.full((worlds, len(FACTORS)), np.nan)
        mujoco_warp.step(self._warp_model, self._warp_data)  # compiles the kernels
        # A step has about a hundred launches, whose arguments Python would pack each time.
        with warp.ScopedCapture(device=self._warp_data.qpos.device) as recorded:
            self._warp_data.overflow.zero_()
            mujoco_warp.step(self._warp_model, self._warp_data)
        self._step = recorded.graph

    def start(self, worlds: int) -> Floats:
        return np.concatenate([self._reference.start(worlds), np.zeros((worlds, self.model.nv))], axis=1)

    def set_parameters(self, rows: Integers, factors: Mapping[str, Floats]) -> None:
        values = np.stack([factors[name] for name in FACTORS], axis=1)
        changed = np.flatnonzero((self._factors[rows] != values).any(axis=1))
        for at in changed:
            vary_model(self._varied, self._nominal, values[at], self._scratch)
            for name, field in self._fields.items():
                field[rows[at]] = getattr(self._varied, name)
        self._factors[rows] = values
        if changed.size:
            for name, field in self._fields.items():
                getattr(self._warp_model, name).assign(field)

    def step(self, physics: Floats, controls: Floats) -> Floats:
        data = self._warp_data
        parts = self._parts(physics.astype(np.float32))
        for name, values in parts.items():
            getattr(data, name).assign(values)
        overflowed = np.zeros(len(physics), dtype=bool)
        for at in range(controls.shape[1]):
            data.ctrl.assign(np.ascontiguousarray(controls[:, at], dtype=np.float32))
            warp.capture_launch(self._step)
            overflowed |= data.overflow.numpy() != 0
        after = [getattr(data, name).numpy().reshape(len(physics), -1) for name in parts]
        found = np.concatenate(after, axis=1).astype(np.float64)
        found[overflowed] = np.nan  # more contacts than the solver has room for: which ones it drops is undefined
        return found

    def sensors(self, physics: Floats, rows: Integers | slice) -> Floats:
        return self._reference.sensors(physics[:, : -self.model.nv], rows)

    def _parts(self, physics: Any) -> dict[str, Any]:
        """The solver's arrays of rows of physics, in order."""
        model = self.model
        widths = {"time": 1, "qpos": model.nq, "qvel": model.nv, "act": model.na, "qacc_warmstart": model.nv}
        found, start = {}, 0
        for name, width in widths.items():
            if width:
                found[name] = np.ascontiguousarray(physics[:, start : start + width])
            start += width
        found["time"] = found["time"][:, 0]
        return found


def _solver(source: str, worlds: int) -> Any:
    robot, scene = newton.ModelBuilder(), newton.ModelBuilder()
    for builder in (robot, scene):
        newton.solvers.SolverMuJoCo.register_custom_attributes(builder)
    try:
        robot.add_mjcf(source)
        scene.replicate(robot, worlds)
        return newton.solvers.SolverMuJoCo(scene.finalize(), kinematic_switchable_roots=False)
    except (ValueError, NotImplementedError) as error:
        hint = 'use engine = "mujoco", or leave out of the MJCF what Newton cannot read'
        raise UserError(f"Newton cannot read the model: {error}", where="robot.engine", hint=hint) from error


def _take_parameters(model: mujoco.MjModel, imported: mujoco.MjModel) -> None:
    """Copy `GIVEN` fields of the compiled model into Newton's, after a check that joints and actuators correspond.

    Newton's names are paths: `quadruped_worldbody_trunk_root`.
    """
    joints = [model.joint(at).name for at in range(model.njnt)]
    labels = [imported.joint(at).name for at in range(imported.njnt)]
    driven = (model.actuator_trnid[:, 0].tolist(), imported.actuator_trnid[:, 0].tolist())
    same = len(joints) == len(labels) and all(map(str.endswith, labels, joints)) and driven[0] == driven[1]
    if not same or model.nbody != imported.nbody:
        what = f"Newton reads the joints {', '.join(labels)} from the model, MuJoCo {', '.join(joints)}"
        hint = 'use engine = "mujoco", or write the MJCF so that both read the same'
        raise UserError(what, where="robot.engine", hint=hint)
    for name in GIVEN:
        if not name.startswith("geom_"):
            getattr(imported, name)[:] = getattr(model, name)
    for at in range(imported.ngeom):
        for geom in range(model.ngeom):
            if (name := model.geom(geom).name) and imported.geom(at).name.endswith(f"_{name}"):
                imported.geom_friction[at] = model.geom_friction[geom]
