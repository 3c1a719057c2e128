"""`tidemill plan staleness`: from what was measured at some lags, the best by progress per wall-clock time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import RenderableType

from tidemill.cli.plan import shown
from tidemill.cli.plan.options import Explain
from tidemill.cli.result import Json, Result
from tidemill.core.errors import UserError
from tidemill.planner.staleness import StalenessPlan, plan_staleness
from tidemill.planner.staleness_runs import measure_runs
from tidemill.planner.staleness_table import read_table
from tidemill.telemetry.numerals import decimal, percent

Table = Annotated[
    Path | None,
    Parameter(
        help="CSV or JSON rows of lag, reward per step, utilisation (0.35 or 35%) and, if known, the reward's standard "
        "error; rows of one lag are repeats."
    ),
]


Runs = Annotated[
    tuple[Path, ...],
    Parameter(negative=(), help="Run directories at several lags, in place of a table; runs of one lag are repeats."),
]


def staleness(*, table: Table = None, runs: Runs = (), explain: Explain = False, json: Json = False) -> Result:
    """The best lag by progress per wall-clock time: staleness costs reward per step and buys steps per hour."""
    if (table is None) == (not runs):
        raise UserError("rows are from a table or from runs", cure="give --table FILE, or --runs DIR for each run")
    plan = plan_staleness(measure_runs(runs) if table is None else read_table(table))
    return shown.result(as_data(plan), as_text(plan), plan.figures, explain=explain)


def as_data(plan: StalenessPlan) -> dict[str, Any]:
    return {
        "best_lag": _whole(plan.best_lag),
        "contenders": [_whole(lag) for lag in plan.contenders],
        "uncertainty": plan.uncertainty,
        "lags": [{**msgspec.to_builtins(each), "lag": _whole(each.lag)} for each in plan.lags],
    }


def as_text(plan: StalenessPlan) -> Iterator[RenderableType]:
    """A line a lag, and the answer."""
    rows = [
        [
            f"{each.lag:g}",
            decimal(each.reward_per_step),
            percent(each.utilisation),
            decimal(each.progress),
            "" if each.low is None or each.high is None else f"{decimal(each.low)} to {decimal(each.high)}",
            "" if each.chance_best is None else percent(each.chance_best),
        ]
        for each in plan.lags
    ]
    headings = ("lag", "reward per step", "utilisation", "progress", "95 % interval", "best in")
    yield shown.table(headings, rows)
    yield ""
    yield f"best lag: {plan.best_lag:g}"
    if others := [f"{lag:g}" for lag in plan.contenders if lag != plan.best_lag]:
        yield f"not ruled out: {', '.join(others)}"
    yield f"uncertainty: {plan.uncertainty}"


def _whole(lag: float) -> float | int:
    return int(lag) if lag == int(lag) else lag
