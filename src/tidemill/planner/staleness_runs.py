"""Rows of the staleness table measured on runs: what each gained per step, and how busy its trainer was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.config.words import counted
from tidemill.core.errors import UserError
from tidemill.planner.staleness_table import Measured
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.run_dir import RunDirectory

FEWEST_STEPS = 5


def measure_runs(run_dirs: Sequence[Path]) -> list[Measured]:
    """A row a run; runs of one lag are repeats.

    Raises:
        UserError: naming the run that is none, or is too short.
    """
    return [measure_run(run_dir) for run_dir in run_dirs]


def measure_run(run_dir: Path) -> Measured:
    """Reward per step is the slope of the mean reward over the steps, by least squares with its standard error;
    utilisation the share of the steps' time in which the trainer computed.

    Raises:
        UserError: it is no run, or has fewer than five steps with a reward.
    """
    run = RunDirectory(run_dir)
    if not run.exists:
        raise UserError("no run there", where=f"--runs {run_dir}", cure="name directories given as --run.dir")
    lines = [line for _, line in read_lines(run.metrics)]
    points = [(float(line["step"]), float(line["reward_mean"])) for line in lines if _has(line, "step", "reward_mean")]
    if len(points) < FEWEST_STEPS:
        what = f"{counted(len(points), 'step')} with a reward, and a slope needs {FEWEST_STEPS}"
        raise UserError(what, where=f"--runs {run_dir}", cure="let it train on")
    timed = [line for line in lines if _has(line, "time_train_s", "time_step_s")]
    busy_s, all_s = (math.fsum(line[name] for line in timed) for name in ("time_train_s", "time_step_s"))
    if not 0 < busy_s <= all_s:
        raise UserError("its steps have no times", where=f"--runs {run_dir}", cure="take another run")
    slope, error = slope_of(points)
    lag = run.read_settings().get("schedule", {}).get("max_policy_lag", 0)
    return Measured(
        lag=float(lag),
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


def _has(line: dict[str, Any], *names: str) -> bool:
    return all(isinstance(line.get(name), int | float) and math.isfinite(line[name]) for name in names)
