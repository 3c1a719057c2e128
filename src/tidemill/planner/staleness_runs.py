"""Rows of the staleness table measured on runs: what each gained per step, and how busy its trainer was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tidemill.config.load import from_toml
from tidemill.config.words import counted
from tidemill.core.errors import UserError
from tidemill.planner.staleness_table import Measured
from tidemill.telemetry.metrics import STEP_TIME, read_metrics
from tidemill.telemetry.run_dir import RunDirectory

FEWEST_STEPS = 5


def measure_runs(run_dirs: Sequence[Path]) -> list[Measured]:
    """A row a run; runs of one lag are repeats.

    Raises:
        UserError: naming the run that is none, is too short, or is given twice.
    """
    places = [run_dir.resolve() for run_dir in run_dirs]
    for at, run_dir in enumerate(run_dirs):
        if places[at] in places[:at]:
            raise UserError("that run is given twice", where=f"--runs {run_dir}", cure="a repeat is a run of its own")
    return [measure_run(run_dir) for run_dir in run_dirs]


def measure_run(run_dir: Path) -> Measured:
    """Reward per step is the slope of the mean reward over the steps, by least squares with its standard error;
    utilisation the share of the steps' time in which the trainer computed.

    Raises:
        UserError: it is no run, its configuration is none, or it has fewer than five steps with a reward.
    """
    run = RunDirectory(run_dir)
    text = run.read_config()
    if text is None:
        raise UserError("no run there", where=f"--runs {run_dir}", cure="name directories given as --run.dir")
    lines = read_metrics(run.metrics)
    points = [(float(line.step), line.values["reward_mean"]) for line in lines if "reward_mean" in line.values]
    if len(points) < FEWEST_STEPS:
        what = f"{counted(len(points), 'step')} with a reward, and a slope needs {FEWEST_STEPS}"
        raise UserError(what, where=f"--runs {run_dir}", cure="let it train on")
    timed = [line.values for line in lines if {"time_train_s", STEP_TIME} <= line.values.keys()]
    busy_s, all_s = (math.fsum(values[name] for values in timed) for name in ("time_train_s", STEP_TIME))
    if not 0 < busy_s <= all_s:
        raise UserError("its steps have no times", where=f"--runs {run_dir}", cure="take another run")
    slope, error = slope_of(points)
    return Measured(
        lag=float(from_toml(text, source=str(run.config)).schedule.max_policy_lag),
        reward_per_step=slope,
        utilisation=busy_s / all_s,
        uncertainty=error,
        where=str(run_dir),
    )


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: (slope, its standard error); of three points or more, not all at one place."""
    count = len(points)
    x_mean, y_mean = (math.fsum(each) / count for each in zip(*points, strict=True))
    spread = math.fsum((x - x_mean) ** 2 for x, _ in points)
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / spread
    left = math.fsum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    return slope, math.sqrt(left / (count - 2) / spread)
