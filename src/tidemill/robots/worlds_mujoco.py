"""C MuJoCo: worlds with other parameters have their own models, and steps do not depend on any step before (no warm
start)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import mujoco
import numpy as np
from mujoco import rollout

from tidemill.robots.task import Floats, Integers

STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS
CONTROLS = int(mujoco.mjtState.mjSTATE_CTRL)
FACTORS = ("mass", "inertia", "friction", "gains")


def _ignore(_: str) -> None:
    """MuJoCo's warnings: otherwise it prints them and appends them to a file in the working directory."""


mujoco.set_mju_user_warning(_ignore)


class MujocoWorlds:
    """Implements `robots.engine.Engine`."""

    def __init__(self, model: mujoco.MjModel, worlds: int) -> None:
        self.model = model
        # A diverged world must be seen as such, and not start silently from the reference pose.
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self._models = [model] * worlds  # shared as long as factors are 1, which is faster by a quarter
        self._factors = np.ones((worlds, len(FACTORS)))
        self._data = mujoco.MjData(model)
        self._rollout = rollout.Rollout(nthread=0)
        self._exact = np.array(model.sensor_needstage != mujoco.mjtStage.mjSTAGE_ACC).repeat(model.sensor_dim)
        self._home = np.zeros(mujoco.mj_stateSize(model, STATE))
        home = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_KEY, "home")
        if home >= 0:
            mujoco.mj_resetDataKeyframe(model, self._data, home)
        mujoco.mj_getState(model, self._data, self._home, STATE)

    def start(self, worlds: int) -> Floats:
        return np.tile(self._home, (worlds, 1))

    def set_parameters(self, rows: Integers, factors: Mapping[str, Floats]) -> None:
        values = np.stack([factors[name] for name in FACTORS], axis=1)
        for at in np.flatnonzero((self._factors[rows] != values).any(axis=1)):
            row = int(rows[at])
            if (values[at] == 1).all():
                self._models[row] = self.model
                continue
            if self._models[row] is self.model:
                self._models[row] = copy.copy(self.model)
            vary_model(self._models[row], self.model, values[at], self._data)
        self._factors[rows] = values

    def step(self, physics: Floats, controls: Floats) -> Floats:
        states, _ = self._roll(physics, controls, self._models[: len(physics)])
        reached = states[:, -1].copy()
        # A world with a warning (not finite, or without space for contacts) stops before the last substep.
        elapsed = self.model.opt.timestep * (controls.shape[1] - 0.5)
        reached[~(reached[:, 0] - physics[:, 0] > elapsed)] = np.nan
        return reached

    def sensors(self, physics: Floats, rows: Integers | slice) -> Floats:
        models = [self._models[at] for at in np.arange(len(physics))[rows]]
        physics = physics[rows]
        if not self.model.nsensordata:
            return np.zeros((len(physics), 0))
        # A step computes sensors before it moves.
        _, sensors = self._roll(physics, np.zeros((len(physics), 1, self.model.nu)), models)
        return np.where(self._exact, sensors[:, 0], 0.0)

    def _roll(self, physics: Floats, controls: Floats, models: list[mujoco.MjModel]) -> tuple[Floats, Floats]:
        worlds, steps, _ = controls.shape
        states = np.empty((worlds, steps, physics.shape[1]))
        sensors = np.empty((worlds, steps, self.model.nsensordata))
        self._rollout.rollout(
            models,
            [self._data],
            np.ascontiguousarray(physics),
            np.ascontiguousarray(controls),
            control_spec=CONTROLS,
            skip_checks=True,
            nstep=steps,
            state=states,
            sensordata=sensors,
        )
        return states, sensors


def vary_model(model: mujoco.MjModel, nominal: mujoco.MjModel, factors: Floats, data: mujoco.MjData) -> None:
    """Set a copy of the nominal model to factors, [4], of the nominal mass, inertia, friction and gains."""
    mass, inertia, friction, gains = factors
    model.body_mass[:] = nominal.body_mass * mass
    model.body_inertia[:] = nominal.body_inertia * inertia
    model.geom_friction[:, 0] = nominal.geom_friction[:, 0] * friction
    model.pair_friction[:, :2] = nominal.pair_friction[:, :2] * friction
    model.actuator_gainprm[:, 0] = nominal.actuator_gainprm[:, 0] * gains
    model.actuator_biasprm[:, 1:3] = nominal.actuator_biasprm[:, 1:3] * gains
    mujoco.mj_setConst(model, data)
