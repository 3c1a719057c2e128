"""`tidemill simulate`: what a recipe's run would come to under several schedules, before anything is rented."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Group, RenderableType

from tidemill.cli.arguments import Items
from tidemill.cli.output import note
from tidemill.cli.plan import shown
from tidemill.cli.result import DryRun, Json, Result
from tidemill.config.load import load_spec
from tidemill.core.errors import UserError
from tidemill.pool.build import outlived
from tidemill.sim.comparison import (
    HEADINGS,
    REMARKS,
    TIMES,
    Compared,
    crowded,
    described,
    figures,
    planned_data,
    rows,
)
from tidemill.sim.scenario import Planned, Scenario, plan_scenario, simulate_planned
from tidemill.telemetry.fleet_figures import HOUR_S
from tidemill.telemetry.numerals import duration

Html = Annotated[Path | None, Parameter(name="--html", help="Write a page with the timelines to this file.")]
TELL_S = 5.0
"""Between two words of progress."""


def simulate(*items: Items, html: Html = None, dry_run: DryRun = False, json: Json = False) -> Result:
    """What a recipe's run would come to: its own controller under a virtual clock, among profiles of engines, trainer
    and network, under each of `simulation.schedules` on the same samples, machines and seed.

    `[simulation]` says of what model and machines; batch, limits, pool, prices, steps and seed are the run's own.
    """
    spec = load_spec(items, purpose="read")
    scenario = plan_scenario(spec)
    words = described(scenario)
    if dry_run:
        words += outlived(spec.pool, spec.simulation.hours * HOUR_S)
        return Result(data=planned_data(scenario), text="\n".join(words))
    if html is not None:
        _try_to_write(html)
    compared, findings = _compare(scenario)
    longest_s = max((one.run.seconds for one in compared if one.planned.plant.worker), default=0.0)
    notes = [*outlived(spec.pool, longest_s), *crowded(compared)]
    said = [*findings.values(), *notes]
    if html is not None:
        from tidemill.sim.page import render

        _write(html, render(spec.run.name, [*words, *said], compared))
    schedules: dict[str, Any] = {one.planned.name: figures(one.run) for one in compared}
    schedules |= {name: {"finding": finding} for name, finding in findings.items()}
    data = {"schedules": schedules, "notes": notes, "scenario": planned_data(scenario)}
    return Result(data=data, text=Group(*as_text(words, compared, said, html)))


def _compare(scenario: Scenario) -> tuple[list[Compared], dict[str, str]]:
    """Every schedule that comes to an end, and by name what is to be said of the others.

    Raises:
        UserError: none does.
    """
    compared, findings, errors = list[Compared](), dict[str, str](), list[UserError]()
    for one in scenario.planned:
        try:
            run = simulate_planned(one, scenario.workload, tell=Progress(one))
        except UserError as error:
            errors.append(error)
            findings[one.name] = f"{one.name}: {error.what}; {error.cure}"
        else:
            compared.append(Compared(planned=one, run=run))
    if not compared:
        raise errors[0]
    return compared, findings


def _try_to_write(html: Path) -> None:
    """Whoever cannot have the page is told before the work; until it is done, what is there stays."""
    there = html.exists()
    _write(html, "", mode="a")
    if not there:
        html.unlink()


def _write(html: Path, page: str, *, mode: Literal["a", "w"] = "w") -> None:
    try:
        with html.open(mode, encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        what = f"the page cannot be written: {error.strerror}"
        raise UserError(what, where=f"--html {html}", cure="choose another file") from error


class Progress:
    """Tells on standard error, now and then, how far a schedule is."""

    def __init__(self, planned: Planned) -> None:
        self._planned, self._told_s = planned, time.monotonic()

    def __call__(self, step: int, now_s: float) -> None:
        if time.monotonic() - self._told_s >= TELL_S:
            self._told_s = time.monotonic()
            note(f"{self._planned.name}: step {step}, {duration(now_s)} simulated")


def as_text(
    words: Sequence[str], compared: Sequence[Compared], said: Sequence[str], html: Path | None
) -> Iterator[RenderableType]:
    yield from shown.plain(*words)
    yield ""
    for columns in (slice(1, TIMES), slice(TIMES, None)):  # narrow enough for any terminal
        yield shown.table((HEADINGS[0], *HEADINGS[columns]), [(row[0], *row[columns]) for row in rows(compared)])
        yield ""
    yield from shown.notes([*said, *REMARKS, *([f"timelines: {html}"] if html else [])])
