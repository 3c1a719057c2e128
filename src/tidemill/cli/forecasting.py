"""`tidemill simulate` and `tidemill calibrate`: simulate schedules; fit a cost profile to a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Group, RenderableType

from tidemill.cli.arguments import Items
from tidemill.cli.output import DryRun, Json, Result, note
from tidemill.cli.plan_options import notes, plain, table
from tidemill.config.load import load_spec
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, duration, percent
from tidemill.hardware.accelerator import accelerator
from tidemill.hardware.placed_memory import memory_lines
from tidemill.hardware.run_profile import QUANTITIES, RunProfile, kept_path, write_profile
from tidemill.planner.calibration.fit import calibrate as fitted
from tidemill.pool.build_provider import trace_outlasted
from tidemill.sim.comparison import (
    HEADINGS,
    REMARKS,
    TIMES,
    Compared,
    Planned,
    Scenario,
    crowded,
    described,
    figures,
    plan_scenario,
    planned_data,
    rows,
    simulate_planned,
)
from tidemill.telemetry.fleet_figures import HOUR_S

Html = Annotated[Path | None, Parameter(name="--html", help="Write a page with the timelines to this file.")]
PROGRESS_S = 5.0
"""Seconds between two progress lines."""


def simulate(*items: Items, html: Html = None, dry_run: DryRun = False, json: Json = False) -> Result:
    """Simulate a recipe: the real controller under a virtual clock, with cost models of engines, trainer and network,
    for each of `simulation.schedules` on the same samples, machines and seed.

    `[simulation]` defines model and machines; batch, limits, pool, prices, steps and seed are the recipe's.
    """
    spec = load_spec(items, purpose="read")
    scenario = plan_scenario(spec)
    words = [*described(scenario), *_placed_memory(spec)]
    if dry_run:
        words += trace_outlasted(spec.pool, spec.simulation.hours * HOUR_S)
        return Result(data=planned_data(scenario), text="\n".join(words))
    if html is not None:
        existed = html.exists()
        _write(html, "", mode="a")
        if not existed:
            html.unlink()
    compared, findings = _compare(scenario)
    longest_s = max((one.run.seconds for one in compared if one.planned.cost_model.worker), default=0.0)
    warnings = [*trace_outlasted(spec.pool, longest_s), *crowded(compared)]
    remarks = [*findings.values(), *warnings]
    if html is not None:
        from tidemill.sim.comparison import render

        _write(html, render(spec.run.name, [*words, *remarks], compared))
    schedules: dict[str, Any] = {one.planned.name: figures(one.run) for one in compared}
    schedules |= {name: {"finding": finding} for name, finding in findings.items()}
    data = {"schedules": schedules, "notes": warnings, "scenario": planned_data(scenario)}
    text: list[RenderableType] = [*plain(*words), ""]
    for columns in (slice(1, TIMES), slice(TIMES, None)):  # two tables, for narrow terminals
        text += [table((HEADINGS[0], *HEADINGS[columns]), [(row[0], *row[columns]) for row in rows(compared)]), ""]
    text += notes([*remarks, *REMARKS, *([f"timelines: {html}"] if html else [])])
    return Result(data=data, text=Group(*text))


def _placed_memory(spec: RunSpec) -> Iterator[str]:
    """The memory of each role that the recipe places on GPUs of a cluster, and the transfer of its weights."""
    if spec.runtime == "ray" and (spec.ray.trainer_gpus or spec.ray.worker_gpus):
        from tidemill.runtime.memory_check import known_models

        if (models := known_models(spec, None, fetch=False)) is not None:
            yield from memory_lines(spec, models, accelerator(spec.deploy))


def _compare(scenario: Scenario) -> tuple[list[Compared], dict[str, str]]:
    """Simulate every schedule; return results and, by name, the errors of the others.

    Raises:
        UserError: no schedule succeeds.
    """
    compared, findings, errors = list[Compared](), dict[str, str](), list[UserError]()
    for one in scenario.planned:
        try:
            run = simulate_planned(one, scenario.workload, tell=Progress(one))
        except UserError as error:
            errors.append(error)
            findings[one.name] = f"{one.name}: {error.what}; {error.hint}"
        else:
            compared.append(Compared(planned=one, run=run))
    if not compared:
        raise errors[0]
    return compared, findings


def _write(html: Path, page: str, *, mode: Literal["a", "w"] = "w") -> None:
    try:
        with html.open(mode, encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        what = f"the page cannot be written: {error.strerror}"
        raise UserError(what, where=f"--html {html}", hint="choose another file") from error


class Progress:
    """Prints the progress of a schedule to standard error every few seconds."""

    def __init__(self, planned: Planned) -> None:
        self._planned, self._printed_s = planned, time.monotonic()

    def __call__(self, step: int, now_s: float) -> None:
        if time.monotonic() - self._printed_s >= PROGRESS_S:
            self._printed_s = time.monotonic()
            note(f"{self._planned.name}: step {step}, {duration(now_s)} simulated")


Out = Annotated[Path | None, Parameter(name="--out", help="Also write the profile to this file.")]


def calibrate(run_dir: Annotated[Path, Parameter(name="RUN_DIR")], /, *, out: Out = None, json: Json = False) -> Result:
    """Fit a cost profile to the logs of a run: the time of a forward pass, a token, an optimizer step, a message.

    The profile is stored in the cache; `tidemill plan run` and `tidemill train` use the newest one for the machine and
    kind of run. Calibrate on at least ten steps on an otherwise idle machine.

    Parameters
    ----------
    run_dir
        The directory given to `tidemill train` as --run.dir.
    """
    if out is not None and out.is_dir():
        raise UserError("is a directory", where=f"--out {out}", hint="name a file in it")
    profile = fitted(run_dir)
    kept = kept_path(profile)
    if out is not None:  # first: a failure changes nothing
        write_profile(profile, out, where=f"--out {out}", hint="choose another file")
    write_profile(profile, kept)
    data = {"profile": msgspec.to_builtins(profile), "files": [str(kept), *([str(out)] if out else ())]}
    return Result(data=data, text=Group(*profile_text(profile, out or kept)))


def profile_text(profile: RunProfile, path: Path) -> Iterator[RenderableType]:
    """One row per number, then the unexplained share of time."""
    machine, steps = profile.machine, counted(profile.steps, "step")
    numbers = ((QUANTITIES[name], one) for name, one in profile.numbers.items())
    cells = (
        [what.meaning, value(one.value, what.unit), value(one.error, what.unit), str(one.count)]
        for what, one in numbers
    )
    title = f"{profile.run}: {steps} on {machine.processor}, {counted(machine.cores, 'core')}"
    yield table(("", "", "±", "of"), cells, title=title)
    yield ""
    unexplained = ", ".join(f"{percent(share)} of the time of {name}" for name, share in profile.residuals.items())
    yield from plain(f"unexplained: {unexplained}")
    yield from plain(
        f"a step took {profile.step_s.value:.3g} s of wall time (± {profile.step_s.error:.2g}) and "
        f"{profile.step_cpu_s.value:.3g} s of CPU time; simulated on an idle machine it takes "
        f"{profile.simulated_step_s:.3g} s"
    )
    yield from notes(profile.notes)
    yield from plain(f"stored in {path}")


def value(number: float, unit: str) -> str:
    """`12.3 ms`, `17 tokens`."""
    if unit != "s":
        return f"{number:.3g} {unit}".strip()
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if number * factor >= 1:
            return f"{number * factor:.3g} {name}"
    return f"{number * 1e6:.3g} µs" if number else "0"
