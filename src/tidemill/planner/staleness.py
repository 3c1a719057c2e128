"""`plan staleness`: the policy lag with the most progress per hour, from a table or from runs."""

from __future__ import annotations

import csv
import difflib
import json
import math
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from tidemill.core.errors import UserError
from tidemill.core.formatting import counted
from tidemill.core.records import Record
from tidemill.hardware.figures import Derivation, Figure
from tidemill.telemetry.metrics import STEP_TIME
from tidemill.telemetry.run_data import RunData

FIELDS = ("lag", "reward_per_step", "utilisation", "uncertainty")
NAMES = {
    "max_policy_lag": "lag",
    "policy_lag": "lag",
    "staleness": "lag",
    "reward": "reward_per_step",
    "utilization": "utilisation",
    "trainer_utilisation": "utilisation",
    "trainer_utilization": "utilisation",
    "stderr": "uncertainty",
    "standard_error": "uncertainty",
    "reward_stderr": "uncertainty",
}
SHAPE = (
    "a line looks like `3,0.10,75%`: lag, reward per step, utilisation, and optionally the standard error of the "
    "reward; several lines with the same lag are repeats"
)


class Measured(Record):
    """One row: the reward gained per step at this lag, and the trainer's utilisation."""

    lag: float
    reward_per_step: float
    utilisation: float  # a share
    uncertainty: float | None = None  # standard error of the reward per step
    where: str = ""  # file and row, for errors


def read_table(path: Path) -> list[Measured]:
    """Read a table of measurements.

    Raises:
        UserError: with file, row and field.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the table: {error.strerror or error}", where=str(path), hint=SHAPE) from error
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8 text", where=str(path), hint=SHAPE) from error
    return parse_table(text, source=str(path))


def parse_table(text: str, *, source: str) -> list[Measured]:
    """Parse JSON (a list of objects or arrays, or an object that contains one) or CSV.

    Raises:
        UserError: with `source`, row and field.
    """
    plain = text.strip().replace("\N{MINUS SIGN}", "-")
    rows = _json_rows(plain, source) if plain[:1] in ("[", "{") else _csv_rows(plain, source)
    found = [_measured(fields, where) for where, fields in rows]
    if not found:
        raise UserError("the table is empty", where=source, hint=SHAPE)
    return found


def _csv_rows(text: str, source: str) -> list[tuple[str, dict[str, Any]]]:
    delimiter = next((each for each in ("\t", ";", ",") if each in text), " ")
    cells_of = csv.reader(text.replace(" %", "%").splitlines(), delimiter=delimiter, skipinitialspace=True)
    lines = [
        (f"{source}:{number}", [cell.strip() for cell in cells if cell.strip() or delimiter != " "])
        for number, cells in enumerate(cells_of, 1)
        if any(cell.strip() for cell in cells) and not cells[0].strip().startswith("#")
    ]
    if not lines:
        return []
    names: Sequence[str] = FIELDS
    try:
        float(lines[0][1][0])
    except ValueError:
        names = [_name(cell, lines[0][0]) for cell in lines[0][1]]
        lines = lines[1:]
    return [(where, _named(cells, names, where)) for where, cells in lines]


def _json_rows(text: str, source: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"broken JSON: {error.msg}", where=f"{source}:{error.lineno}", hint=SHAPE) from error
    if isinstance(tree, dict):
        tree = next((value for value in tree.values() if isinstance(value, list)), None)
    if not isinstance(tree, list):
        raise UserError(
            "contains no list of rows", where=source, hint='[{"lag": 0, "reward_per_step": 0.15, ...}, ...]'
        )
    rows = []
    for number, row in enumerate(tree):
        where = f"{source}: [{number}]"
        if isinstance(row, list):
            rows.append((where, _named(row, FIELDS, where)))
        elif isinstance(row, dict):
            rows.append((where, {_name(str(name), where): value for name, value in row.items()}))
        else:
            raise UserError(f"{row!r} is not a row", where=where, hint=SHAPE)
    return rows


def _named(cells: Sequence[Any], names: Sequence[str], where: str) -> dict[str, Any]:
    if len(cells) > len(names):
        raise UserError(f"has {len(cells)} fields, and {len(names)} are known", where=where, hint=SHAPE)
    return dict(zip(names, cells, strict=False))


def _name(heading: str, where: str) -> str:
    plain = heading.strip(" %").lower().replace(" ", "_").replace("-", "_")
    if (name := NAMES.get(plain, plain)) in FIELDS:
        return name
    close = difflib.get_close_matches(plain, (*FIELDS, *NAMES), 1, 0.6)
    hint = f"did you mean {close[0]}?" if close else f"columns: {', '.join(FIELDS)}"
    raise UserError(f"unknown column {heading!r}", where=where, hint=hint)


def _measured(fields: dict[str, Any], where: str) -> Measured:
    for name in FIELDS[:3]:
        if fields.get(name) in (None, ""):
            raise UserError(f"has no {name}", where=where, hint=SHAPE)
    lag, reward = (_number(fields[name], name, where) for name in FIELDS[:2])
    uncertainty = (
        None if fields.get("uncertainty") in (None, "") else _number(fields["uncertainty"], "uncertainty", where)
    )
    if lag < 0:
        raise UserError(f"lag is {lag:g}, needs 0 or more", where=where, hint="a lag is 0 or more versions")
    if uncertainty is not None and uncertainty < 0:
        raise UserError(
            f"uncertainty is {uncertainty:g}, needs 0 or more", where=where, hint="a standard error is 0 or more"
        )
    return Measured(
        lag=lag,
        reward_per_step=reward,
        utilisation=_share(fields["utilisation"], where),
        uncertainty=uncertainty,
        where=where,
    )


def _share(given: Any, where: str) -> float:
    """Parse a fraction or a percentage: 0.35, 35 % and 35 are equal."""
    text = str(given)
    value = _number(text.rstrip(" %") if "%" in text else given, "utilisation", where)
    share = value / 100 if "%" in text or value > 1 else value
    if not 0 < share <= 1:
        what = f"utilisation is {given!r}, needs more than 0 and at most 100 %"
        raise UserError(what, where=where, hint="write 0.35 or 35%")
    return share


def _number(given: Any, name: str, where: str) -> float:
    try:
        value = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{name} {given!r} is not a number", where=where, hint=SHAPE)
    return value


RESAMPLES = 2000
SEED = 0
LEVEL = 0.95
CONTENDER = 0.05
"""A lag is a contender if the probability that it is the best exceeds this."""
FEW = 5
"""With fewer repeats the bootstrap underestimates the spread."""
SOURCE = "steps per hour are proportional to the trainer's utilisation, here relative to the smallest lag's"

Draw = Callable[[random.Random], tuple[float, float]]  # (reward per step, utilisation)


class LagProgress(Record):
    """Progress of one lag, in reward per step of the smallest lag's duration."""

    lag: float
    reward_per_step: float  # mean of the repeats
    utilisation: float
    repeats: int
    progress: float
    low: float | None = None  # of the 95 % interval; None if the uncertainty is unknown
    high: float | None = None
    chance_best: float | None = None


class StalenessPlan(Record):
    best_lag: float
    contenders: tuple[float, ...]  # lags that may be the best; only the best one if the uncertainty is unknown
    lags: tuple[LagProgress, ...]  # by lag
    uncertainty: str  # its source, for the user
    figures: tuple[Figure, ...]


def plan_staleness(rows: Sequence[Measured]) -> StalenessPlan:
    """Find the lag with the most progress per wall-clock time.

    The uncertainty is from a bootstrap over the repeats of a lag (Efron 1979), or from normal deviates with the
    given standard error; a lag with neither is taken as exact.

    Args:
        rows: at least one.
    """
    groups: dict[float, list[Measured]] = {}
    for row in sorted(rows, key=lambda each: each.lag):
        groups.setdefault(row.lag, []).append(row)
    base = fmean(row.utilisation for row in next(iter(groups.values())))
    sheet = Derivation()
    lags = [_progress(lag, group, base, sheet) for lag, group in groups.items()]
    known = any(_varies(group) for group in groups.values())
    if known:
        lags = _with_chances(lags, [_drawing(group) for group in groups.values()])
    best = max(lags, key=lambda each: each.progress)
    contenders = [each.lag for each in lags if each is best or (each.chance_best or 0.0) > CONTENDER]
    return StalenessPlan(
        best_lag=best.lag,
        contenders=tuple(contenders),
        lags=tuple(lags),
        uncertainty=_words(groups.values()) if known else "none given: no repeats and no standard errors",
        figures=tuple(sheet.figures),
    )


def _progress(lag: float, group: Sequence[Measured], base: float, sheet: Derivation) -> LagProgress:
    reward, utilisation = fmean(row.reward_per_step for row in group), fmean(row.utilisation for row in group)
    progress = sheet.compute(
        f"lag_{lag:g}.progress",
        "reward per step of the smallest lag's duration",
        formula="reward_per_step * utilisation / utilisation_of_smallest_lag",
        source=SOURCE,
        reward_per_step=reward,
        utilisation=utilisation,
        utilisation_of_smallest_lag=base,
    )
    return LagProgress(lag=lag, reward_per_step=reward, utilisation=utilisation, repeats=len(group), progress=progress)


def _varies(group: Sequence[Measured]) -> bool:
    return len(group) > 1 or any(row.uncertainty for row in group)


def _drawing(group: Sequence[Measured]) -> Draw:
    """A function that draws another possible mean row of a lag."""
    if len(group) == 1:
        (row,) = group
        return lambda rng: (rng.gauss(row.reward_per_step, row.uncertainty or 0.0), row.utilisation)

    def resample(rng: random.Random) -> tuple[float, float]:
        drawn = rng.choices(group, k=len(group))
        rewards = (rng.gauss(row.reward_per_step, row.uncertainty or 0.0) for row in drawn)
        return fmean(rewards), fmean(row.utilisation for row in drawn)

    return resample


def _with_chances(lags: Sequence[LagProgress], draws: Sequence[Draw]) -> list[LagProgress]:
    rng, wins = random.Random(SEED), [0] * len(lags)
    seen: list[list[float]] = [[] for _ in lags]
    for _ in range(RESAMPLES):
        drawn = [draw(rng) for draw in draws]
        base = drawn[0][1]
        values = [reward * utilisation / base for reward, utilisation in drawn]
        wins[values.index(max(values))] += 1
        for kept, value in zip(seen, values, strict=True):
            kept.append(value)
    found = []
    for lag, values, won in zip(lags, seen, wins, strict=True):
        values.sort()
        cut = round(RESAMPLES * (1 - LEVEL) / 2)
        found.append(replace(lag, low=values[cut], high=values[-1 - cut], chance_best=won / RESAMPLES))
    return found


def _words(groups: Collection[Sequence[Measured]]) -> str:
    """Describe the source of the uncertainty, and name the lags without any."""
    repeated = sum(len(group) > 1 for group in groups)
    certain = [f"{group[0].lag:g}" for group in groups if not _varies(group)]
    text = "bootstrap over repeats" if repeated else "the given standard errors"
    few = [group for group in groups if 1 < len(group) < FEW]
    text += f"; with fewer than {FEW} repeats of a lag its interval is too narrow" if few else ""
    return f"{text}; no uncertainty is known for lag {', '.join(certain)}" if certain else text


FEWEST_STEPS = 5


def measure_runs(run_dirs: Sequence[Path]) -> list[Measured]:
    """One row per run; runs with the same lag are repeats.

    Raises:
        UserError: a directory has no run, the run is too short, or it is given twice.
    """
    places = [run_dir.resolve() for run_dir in run_dirs]
    for at, run_dir in enumerate(run_dirs):
        if places[at] in places[:at]:
            raise UserError("this run is given twice", where=f"--runs {run_dir}", hint="a repeat needs a separate run")
    return [measure_run(run_dir) for run_dir in run_dirs]


def measure_run(run_dir: Path) -> Measured:
    """Measure a run.

    The reward per step is the slope of the mean reward over the steps by least squares, with its standard error.
    The utilisation is the fraction of the steps' time in which the trainer computed.

    Raises:
        UserError: there is no run, its configuration is invalid, or it has fewer than five steps with a reward.
    """
    run = RunData.read(run_dir, where=f"--runs {run_dir}")
    points = [(float(line.step), line.values["reward_mean"]) for line in run.metrics if "reward_mean" in line.values]
    if len(points) < FEWEST_STEPS:
        what = f"has {counted(len(points), 'step')} with a reward, a slope needs {FEWEST_STEPS}"
        raise UserError(what, where=f"--runs {run_dir}", hint="train for more steps")
    timed = [line.values for line in run.metrics if {"time_train_s", STEP_TIME} <= line.values.keys()]
    busy_s, all_s = (math.fsum(values[name] for values in timed) for name in ("time_train_s", STEP_TIME))
    if not 0 < busy_s <= all_s:
        raise UserError("its steps have no times", where=f"--runs {run_dir}", hint="take another run")
    slope, error = slope_of(points)
    return Measured(
        lag=float(run.spec.schedule.max_policy_lag),
        reward_per_step=slope,
        utilisation=busy_s / all_s,
        uncertainty=error,
        where=str(run_dir),
    )


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line by least squares and return (slope, its standard error); needs three points with different x."""
    count = len(points)
    x_mean, y_mean = (math.fsum(each) / count for each in zip(*points, strict=True))
    spread = math.fsum((x - x_mean) ** 2 for x, _ in points)
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / spread
    left = math.fsum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    return slope, math.sqrt(left / (count - 2) / spread)
