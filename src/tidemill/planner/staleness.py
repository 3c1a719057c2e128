"""`plan staleness`: which lag gains most per hour. Staleness costs reward per step and buys steps per hour."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from statistics import fmean

from msgspec.structs import replace

from tidemill.core.records import Record
from tidemill.planner.figures import Figure, Sheet
from tidemill.planner.staleness_table import Measured

RESAMPLES = 2000
SEED = 0
LEVEL = 0.95
CONTENDER = 0.05
"""A lag that chance makes the best more often than this is not ruled out."""
FEW = 5
"""Fewer repeats than this, resampled, say too little about how different others might be."""
SOURCE = "steps per hour rise with the trainer's utilisation, taken relative to the smallest lag's"

Draw = Callable[[random.Random], tuple[float, float]]  # (reward per step, utilisation)


class LagProgress(Record):
    """What one lag gains, in reward per step of the smallest lag's duration."""

    lag: float
    reward_per_step: float  # mean of the repeats
    utilisation: float
    repeats: int
    progress: float
    low: float | None = None  # of the 95 % interval; None where nothing says how uncertain the rows are
    high: float | None = None
    chance_best: float | None = None


class StalenessPlan(Record):
    best_lag: float
    contenders: tuple[float, ...]  # lags that may as well be the best; the best alone where nothing is known
    lags: tuple[LagProgress, ...]  # by lag
    uncertainty: str  # where it is from, in words
    figures: tuple[Figure, ...]


def plan_staleness(rows: Sequence[Measured]) -> StalenessPlan:
    """The best lag by progress per wall-clock time.

    Repeats of a lag are resampled (a bootstrap over runs, Efron 1979); a stated standard error is drawn from a normal
    distribution; a lag with neither is taken as certain.

    Args:
        rows: at least one.
    """
    groups: dict[float, list[Measured]] = {}
    for row in sorted(rows, key=lambda each: each.lag):
        groups.setdefault(row.lag, []).append(row)
    base = fmean(row.utilisation for row in next(iter(groups.values())))
    sheet = Sheet()
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


def _progress(lag: float, group: Sequence[Measured], base: float, sheet: Sheet) -> LagProgress:
    reward, utilisation = fmean(row.reward_per_step for row in group), fmean(row.utilisation for row in group)
    progress = sheet.note(
        f"lag_{lag:g}.progress",
        reward * utilisation / base,
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
    """How a lag's mean row might as well have come out."""
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
    """Where the uncertainty is from, and what has none."""
    repeated = sum(len(group) > 1 for group in groups)
    certain = [f"{group[0].lag:g}" for group in groups if not _varies(group)]
    text = "bootstrap over repeats" if repeated else "the standard errors given"
    few = [group for group in groups if 1 < len(group) < FEW]
    text += f"; with fewer than {FEW} repeats of a lag its interval is too narrow" if few else ""
    return f"{text}; taken as certain, for want of either: lag {', '.join(certain)}" if certain else text
