"""Estimate physical parameters from logs: nonlinear least squares on simulated positions of joints.

The optimiser is that of `mujoco.sysid` (`mujoco.minimize.least_squares`). What `mujoco.sysid` 3.17 lacks is added:
the initial state of each log is estimated, too (a measured one is noisy, which would bias the parameters); every joint
has its own noise, estimated from the residuals; several starts and a growing horizon avoid local minima, which a pole
that passes the top has many of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import mujoco
import numpy as np
from mujoco import minimize, rollout

from tidemill.core.records import Record
from tidemill.robots.parameters import apply_parameters, model_spec, nominal_value
from tidemill.robots.simulation import random_of
from tidemill.robots.task import Floats

STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS
STARTS = 8
HORIZONS = (0.15, 0.4, 1.0)  # of each log, one after another
STEP = 1e-5  # of finite differences
FITS = 1.3  # a mean square of normalised residuals below this needs no further start
AGREEING, SAME = 3, 1.001  # or so many starts with the lowest cost, up to this factor
FIRST_ROWS = 5  # from which the initial velocity is guessed
DIVERGED = 1e3  # in place of positions that are not finite
FREE = 1e3  # bound of initial states
EDGE = 1e-3  # of the range of a parameter: there a search has ended at its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One recorded episode of T rows; a row is measured before its controls."""

    positions: Floats  # [T, measured joints]
    controls: Floats  # [T, nu]


class Estimate(Record):
    """A parameter with its interval."""

    value: float
    low: float
    high: float
    model: float  # the nominal value
    at_limit: bool  # the search ended at the end of its range: the true value may be outside


class Identified(Record):
    """Result of `identify`, as `robots.parameters.read_parameters` reads it."""

    parameters: dict[str, Estimate]
    noise: dict[str, float]  # standard deviation of the residuals by joint
    rows: int
    starts: int  # searches from different values
    confidence: float


class LogFit:
    """Residuals of logs as a function of x: the logarithms of the parameters' factors, then the initial position and
    velocity of every measured joint of each log."""

    def __init__(
        self,
        source: str,
        model: mujoco.MjModel,
        names: Sequence[str],
        joints: Sequence[str],
        logs: Sequence[Log],
        substeps: int,
    ) -> None:
        self._source, self._model, self._substeps = source, model, substeps
        self.names, self.logs = names, logs
        self.nominal = {name: nominal_value(model, name) for name in names}
        self._columns = np.array([int(model.joint(joint).qposadr[0]) for joint in joints])
        self._dofs = np.array([int(model.joint(joint).dofadr[0]) for joint in joints])
        self._data = mujoco.MjData(model)
        self._rollout = rollout.Rollout(nthread=0)
        self.rows = max(len(log.positions) for log in logs)  # horizon
        self._measured = np.full((len(logs), self.rows, len(joints)), np.nan)
        self._controls = np.zeros((len(logs), self.rows, model.nu))
        for at, log in enumerate(logs):
            self._measured[at, : len(log.positions)] = log.positions
            self._controls[at, : len(log.controls)] = log.controls
        self.noise = np.array([_noise(log.positions) for log in logs]).mean(axis=0)  # [joints]
        self._width = 2 * len(joints)  # unknowns of the initial state of one log

    def first_guess(self, factors: Floats) -> Floats:
        """x for factors of the parameters."""
        dt = self._model.opt.timestep * self._substeps
        states = []
        for log in self.logs:
            first = log.positions[:FIRST_ROWS]
            slope, level = np.polyfit(dt * np.arange(len(first)), first, 1)
            states += [level, slope]
        return np.concatenate([np.log(factors), *states])

    def residuals(self, x: Floats) -> Floats:
        """[logs * rows * joints, points] in units of the noise, for x [unknowns, points]."""
        points = x.reshape(len(x), -1).T
        difference = (self._simulate(points) - self._measured[None, :, : self.rows]) / self.noise
        residuals: Floats = np.nan_to_num(difference, nan=0.0).reshape(len(points), -1).T
        return residuals

    def jacobian(self, x: Floats, residuals: Floats) -> Floats:
        """[logs * rows * joints, unknowns] by central differences. The initial states of all logs move together,
        because a log does not depend on the state of another."""
        flat, parameters, logs = x.reshape(-1), len(self.names), np.arange(len(self.logs))
        directions = np.zeros((len(flat), parameters + self._width))
        directions[:parameters, :parameters] = np.eye(parameters)
        directions[parameters:, parameters:] = np.tile(np.eye(self._width), (len(logs), 1))
        steps = STEP * directions
        found = self.residuals(np.concatenate([flat[:, None] + steps, flat[:, None] - steps], axis=1))
        above, below = np.split(found, 2, axis=1)
        slopes = (above - below) / (2 * STEP)
        of_states = np.zeros((len(logs), len(slopes) // len(logs), len(logs), self._width))
        of_states[logs, :, logs] = slopes[:, parameters:].reshape(len(logs), -1, self._width)
        return np.concatenate([slopes[:, :parameters], of_states.reshape(len(slopes), -1)], axis=1)

    def fit(self, x: Floats, within: tuple[float, float]) -> Floats:
        """The x of least squares from a first guess, with the factors of the parameters in a range."""
        bounds = [np.full(len(x), -FREE), np.full(len(x), FREE)]
        bounds[0][: len(self.names)], bounds[1][: len(self.names)] = np.log(within)
        found, _ = minimize.least_squares(
            x, self.residuals, bounds, self.jacobian, x_scale="jac", xtol=1e-7, max_iter=40, mu_factor=2.0,
            verbose=minimize.Verbosity.SILENT,
        )  # fmt: skip
        return np.asarray(found, dtype=np.float64)

    def _simulate(self, points: Floats) -> Floats:
        """Positions [points, logs, rows, joints]."""
        parameters, logs = len(self.names), len(self.logs)
        models, states = [], []
        for point in points:
            logarithms = zip(self.nominal.items(), point[:parameters], strict=True)
            values = {name: nominal * math.exp(logarithm) for (name, nominal), logarithm in logarithms}
            changed = apply_parameters(model_spec(self._source), self._model, values)
            changed.opt.timestep = self._model.opt.timestep
            models += [changed] * logs
            states += [self._state(changed, initial) for initial in np.split(point[parameters:], logs)]
        controls = np.repeat(self._controls[:, : self.rows - 1], self._substeps, axis=1)
        initial = np.array(states)
        later, _ = self._rollout.rollout(models, [self._data], initial, np.tile(controls, (len(points), 1, 1)))
        rows = np.concatenate([initial[:, None], later[:, self._substeps - 1 :: self._substeps]], axis=1)
        positions = np.nan_to_num(rows[:, :, 1 + self._columns], nan=DIVERGED, posinf=DIVERGED, neginf=-DIVERGED)
        found: Floats = np.clip(positions, -DIVERGED, DIVERGED).reshape(len(points), logs, self.rows, -1)
        return found

    def _state(self, model: mujoco.MjModel, initial: Floats) -> Floats:
        mujoco.mj_resetData(model, self._data)
        home = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_KEY, "home")
        if home >= 0:
            mujoco.mj_resetDataKeyframe(model, self._data, home)
        self._data.qpos[self._columns], self._data.qvel[self._dofs] = np.split(initial, 2)
        state = np.zeros(mujoco.mj_stateSize(model, STATE))
        mujoco.mj_getState(model, self._data, state, STATE)
        return state


def _noise(positions: Floats) -> Floats:
    """Standard deviation of the noise of each column of a smooth signal, from third differences: their variance is
    1 + 9 + 9 + 1 times that of the noise."""
    variance: Floats = np.mean(np.diff(positions, n=3, axis=0) ** 2, axis=0) / 20
    return np.maximum(np.sqrt(variance), 1e-6)


def identify(
    fit: LogFit, *, within: tuple[float, float], confidence: float, seed: int, joints: Sequence[str]
) -> Identified:
    """Fit the parameters of logs.

    Args:
        within: range of every factor of the model's values.
        confidence: coverage of the intervals, 0.95 for 95 %.
    """
    parameters, longest = len(fit.names), fit.rows
    random = random_of(seed, "identify")
    low, high = np.log(within)
    best, costs = fit.first_guess(np.ones(parameters)), list[float]()
    for start in range(STARTS):
        middle_half = np.exp(low * 0.5 + random.random(parameters) * (high - low) * 0.5)
        x = fit.first_guess(np.clip(middle_half if start else np.ones(parameters), *within))
        for horizon in HORIZONS:
            fit.rows = max(min(longest, 4 * FIRST_ROWS), round(horizon * longest))
            x = fit.fit(x, within)
        costs.append(float(np.mean(fit.residuals(x) ** 2)))
        best = x if costs[-1] <= min(costs) else best
        if min(costs) < FITS or sum(cost < SAME * min(costs) for cost in costs) == AGREEING:
            break
    fit.rows = longest
    for _ in range(2):  # the noise of every joint from its residuals
        fit.noise = fit.noise * np.sqrt(np.mean(fit.residuals(best).reshape(-1, len(joints)) ** 2, axis=0))
        best = fit.fit(best, within)
    residuals = fit.residuals(best)
    rows = int(np.count_nonzero(residuals))
    deviations = _deviations(residuals, fit.jacobian(best, residuals))
    reach = NormalDist().inv_cdf(0.5 + confidence / 2)
    estimates = {}
    for (name, nominal), logarithm, deviation in zip(fit.nominal.items(), best, deviations, strict=False):
        half = min(reach * deviation, high - low)
        ends = (logarithm, logarithm - half, logarithm + half)
        value, lowest, highest = (nominal * math.exp(each) for each in ends)
        at_limit = bool(min(logarithm - low, high - logarithm) < EDGE * (high - low))
        estimates[name] = Estimate(value=value, low=lowest, high=highest, model=nominal, at_limit=at_limit)
    noise = dict(zip(joints, fit.noise.tolist(), strict=True))
    return Identified(parameters=estimates, noise=noise, rows=rows, starts=len(costs), confidence=confidence)


def _deviations(residuals: Floats, jacobian: Floats) -> Floats:
    """Standard deviation of every unknown, from the inverse of the Gauss-Newton Hessian."""
    freedom = max(int(np.count_nonzero(residuals)) - jacobian.shape[1], 1)
    scale = np.maximum(np.linalg.norm(jacobian, axis=0), 1e-12)
    covariance = np.linalg.pinv((jacobian / scale).T @ (jacobian / scale), hermitian=True)
    deviations: Floats = np.sqrt(np.diag(covariance) * float((residuals**2).sum()) / freedom) / scale
    return deviations
