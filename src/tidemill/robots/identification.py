"""Estimate physical parameters from logs: nonlinear least squares on simulated positions of joints.

The optimiser is that of `mujoco.sysid` (`mujoco.minimize.least_squares`). What `mujoco.sysid` 3.17 lacks is added:
the initial state of each log is estimated, too (a measured one is noisy, which would bias the parameters); every joint
has its own noise, estimated from the residuals; several starts and a growing horizon avoid local minima, which a pole
that passes the top has many of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import mujoco
import numpy as np
from mujoco import minimize, rollout

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One recorded episode of T rows; a row is measured before its controls."""

    positions: Floats  # [T, measured joints]
    controls: Floats  # [T, nu]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A parameter with its interval."""

    value: float
    low: float
    high: float
    nominal: float  # of the model
    at_limit: bool  # the search ended at the end of its range: the true value may be outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified:
    """Result of `identify`."""

    estimates: dict[str, Estimate]
    noise: dict[str, float]  # standard deviation of the residuals by joint
    rows: int
    starts: int  # searches from different values


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
        rows = max(len(log.positions) for log in logs)
        measured = np.full((len(logs), rows, len(joints)), np.nan)
        self._controls = np.zeros((len(logs), rows, model.nu))
        for at, log in enumerate(logs):
            measured[at, : len(log.positions)] = log.positions
            self._controls[at, : len(log.controls)] = log.controls
        self._measured = measured
        self.noise = np.array([_noise(log.positions) for log in logs]).mean(axis=0)  # [joints]
        self.rows = rows  # horizon

    @property
    def width(self) -> int:
        """Unknowns of the initial state of one log."""
        return 2 * len(self._columns)

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
        predicted = self._simulate(points)
        difference = (predicted - self._measured[None, :, : self.rows]) / self.noise
        residuals: Floats = np.nan_to_num(difference, nan=0.0).reshape(len(points), -1).T
        return residuals

    def jacobian(self, x: Floats, residuals: Floats) -> Floats:
        """[logs * rows * joints, unknowns] by central differences. The initial states of all logs move together,
        because a log does not depend on the state of another."""
        flat, parameters, logs = x.reshape(-1), len(self.names), len(self.logs)
        directions = [np.eye(len(flat))[at] for at in range(parameters)]
        for at in range(self.width):
            directions.append(np.zeros(len(flat)))
            directions[-1][parameters + at :: self.width] = 1.0
        steps = STEP * np.array(directions).T
        both = np.concatenate([flat[:, None] + steps, flat[:, None] - steps], axis=1)
        found = self.residuals(both)
        slopes = (found[:, : len(directions)] - found[:, len(directions) :]) / (2 * STEP)
        jacobian = np.zeros((len(slopes), len(flat)))
        jacobian[:, :parameters] = slopes[:, :parameters]
        for log, rows in enumerate(np.split(np.arange(len(slopes)), logs)):
            first = parameters + log * self.width
            jacobian[rows, first : first + self.width] = slopes[rows, parameters:]
        return jacobian

    def _simulate(self, points: Floats) -> Floats:
        """Positions [points, logs, rows, joints]."""
        parameters, logs = len(self.names), len(self.logs)
        models, states = [], []
        for point in points:
            changed = self.model_of(point[:parameters])
            for log in range(logs):
                models.append(changed)
                states.append(self._state(changed, point[parameters + log * self.width :][: self.width]))
        controls = np.repeat(self._controls[:, : self.rows - 1], self._substeps, axis=1)
        initial = np.array(states)
        later, _ = self._rollout.rollout(models, [self._data], initial, np.tile(controls, (len(points), 1, 1)))
        rows = np.concatenate([initial[:, None], later[:, self._substeps - 1 :: self._substeps]], axis=1)
        positions = np.nan_to_num(rows[:, :, 1 + self._columns], nan=DIVERGED, posinf=DIVERGED, neginf=-DIVERGED)
        found: Floats = np.clip(positions, -DIVERGED, DIVERGED).reshape(len(points), logs, self.rows, -1)
        return found

    def model_of(self, logarithms: Floats) -> mujoco.MjModel:
        """The model with the parameters' factors of these logarithms."""
        values = {name: self.nominal[name] * math.exp(each) for name, each in zip(self.names, logarithms, strict=True)}
        changed = apply_parameters(model_spec(self._source), self._model, values)
        changed.opt.timestep = self._model.opt.timestep
        return changed

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
    centre = np.ones(parameters)
    best, best_cost = fit.first_guess(centre), math.inf
    costs = list[float]()
    for start in range(STARTS):
        middle_half = np.exp(np.log(within[0]) * 0.5 + random.random(parameters) * np.log(within[1] / within[0]) * 0.5)
        x = fit.first_guess(np.clip(centre if start == 0 else middle_half, *within))
        for horizon in HORIZONS:
            fit.rows = max(min(longest, 4 * FIRST_ROWS), round(horizon * longest))
            x = _least_squares(fit, x, within)
        cost = float(np.mean(fit.residuals(x) ** 2))
        if cost < best_cost:
            best, best_cost = x, cost
        costs.append(cost)
        if best_cost < FITS or sum(each < SAME * best_cost for each in costs) == AGREEING:
            break
    fit.rows = longest
    for _ in range(2):  # the noise of every joint from its residuals
        fit.noise = fit.noise * np.sqrt(np.mean(fit.residuals(best).reshape(-1, len(joints)) ** 2, axis=0))
        best = _least_squares(fit, best, within)
    return _with_intervals(fit, best, within, confidence, joints, len(costs))


def _least_squares(fit: LogFit, x: Floats, within: tuple[float, float]) -> Floats:
    parameters = len(fit.names)
    free = 1e3  # of initial states
    bounds = [np.full(len(x), -free), np.full(len(x), free)]
    bounds[0][:parameters], bounds[1][:parameters] = np.log(within)
    found, _ = minimize.least_squares(
        x, fit.residuals, bounds, fit.jacobian, x_scale="jac", xtol=1e-7, max_iter=40, mu_factor=2.0,
        verbose=minimize.Verbosity.SILENT,
    )  # fmt: skip
    return np.asarray(found, dtype=np.float64)


def _with_intervals(
    fit: LogFit, x: Floats, within: tuple[float, float], confidence: float, joints: Sequence[str], starts: int
) -> Identified:
    """Intervals from the inverse of the Gauss-Newton Hessian."""
    residuals = fit.residuals(x)
    jacobian = fit.jacobian(x, residuals)
    rows = int(np.count_nonzero(residuals))
    variance = float((residuals**2).sum()) / max(rows - len(x), 1)
    scale = np.maximum(np.linalg.norm(jacobian, axis=0), 1e-12)
    covariance = np.linalg.pinv((jacobian / scale).T @ (jacobian / scale), hermitian=True) * variance
    deviations = np.sqrt(np.diag(covariance)) / scale
    reach = NormalDist().inv_cdf(0.5 + confidence / 2)
    estimates = {}
    for at, name in enumerate(fit.names):
        logarithm, nominal = float(x[at]), fit.nominal[name]
        half = min(reach * float(deviations[at]), math.log(within[1] / within[0]))
        edge = 1e-3 * math.log(within[1] / within[0])
        estimates[name] = Estimate(
            value=nominal * math.exp(logarithm),
            low=nominal * math.exp(logarithm - half),
            high=nominal * math.exp(logarithm + half),
            nominal=nominal,
            at_limit=min(logarithm - math.log(within[0]), math.log(within[1]) - logarithm) < edge,
        )
    noise = dict(zip(joints, (float(each) for each in fit.noise), strict=True))
    return Identified(estimates=estimates, noise=noise, rows=rows, starts=starts)


def as_result(identified: Identified, *, confidence: float) -> Mapping[str, object]:
    """The document that `robots.parameters.read_parameters` reads."""
    return {
        "parameters": {
            name: {
                "value": each.value,
                "low": each.low,
                "high": each.high,
                "model": each.nominal,
                "at_limit": each.at_limit,
            }
            for name, each in identified.estimates.items()
        },
        "confidence": confidence,
        "noise": identified.noise,
        "rows": identified.rows,
        "starts": identified.starts,
    }
