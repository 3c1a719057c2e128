"""C MuJoCo: every world has its own model, and steps do not depend on any step before (no warm start)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import mujoco
import numpy as np
from mujoco import rollout

from tidemill.robots.task import Floats, Integers

STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS


class MujocoWorlds:
    """Implements `robots.engine.Engine`."""

    def __init__(self, model: mujoco.MjModel, worlds: int) -> None:
        self.model = model
        self._models = [copy.copy(model) for _ in range(worlds)]
        self._data = mujoco.MjData(model)
        self._rollout = rollout.Rollout(nthread=0)
        self._home = np.zeros(mujoco.mj_stateSize(model, STATE))
        home = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_KEY, "home")
        if home >= 0:
            mujoco.mj_resetDataKeyframe(model, self._data, home)
        mujoco.mj_getState(model, self._data, self._home, STATE)

    def start(self, worlds: int) -> Floats:
        return np.tile(self._home, (worlds, 1))

    def set_parameters(self, rows: Integers, factors: Mapping[str, Floats]) -> None:
        nominal = self.model
        for at, row in enumerate(rows):
            model = self._models[row]
            model.body_mass[:] = nominal.body_mass * factors["mass"][at]
            model.body_inertia[:] = nominal.body_inertia * factors["inertia"][at]
            model.geom_friction[:, 0] = nominal.geom_friction[:, 0] * factors["friction"][at]
            model.actuator_gainprm[:, 0] = nominal.actuator_gainprm[:, 0] * factors["gains"][at]
            model.actuator_biasprm[:, 1:3] = nominal.actuator_biasprm[:, 1:3] * factors["gains"][at]
            mujoco.mj_setConst(model, self._data)

    def step(self, physics: Floats, controls: Floats) -> Floats:
        states, _ = self._rollout.rollout(self._models, [self._data], physics, controls)
        return np.ascontiguousarray(states[:, -1])

    def sensors(self, physics: Floats) -> Floats:
        found = np.zeros((len(physics), self.model.nsensordata))
        if self.model.nsensordata:
            for row, state in enumerate(physics):
                mujoco.mj_setState(self._models[row], self._data, state, STATE)
                mujoco.mj_fwdPosition(self._models[row], self._data)
                mujoco.mj_fwdVelocity(self._models[row], self._data)
                mujoco.mj_sensorPos(self._models[row], self._data)
                mujoco.mj_sensorVel(self._models[row], self._data)
                found[row] = self._data.sensordata
        return found
