"""`tidemill calibrate RUN_DIR`: what the parts of a run take on this machine, for the forecasts of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Group, RenderableType

from tidemill.cli.plan.shown import notes, plain, table
from tidemill.cli.result import Json, Result
from tidemill.config.words import counted
from tidemill.core.errors import UserError
from tidemill.planner.calibration.calibrate import calibrate as fitted
from tidemill.planner.calibration.profile import QUANTITIES, RunProfile, kept_path, write_profile
from tidemill.telemetry.numerals import percent

Out = Annotated[Path | None, Parameter(name="--out", help="Also write the profile to this file.")]


def calibrate(run_dir: Annotated[Path, Parameter(name="RUN_DIR")], /, *, out: Out = None, json: Json = False) -> Result:
    """Fit a profile to a run's logs: what a forward pass, a token, an optimizer step, a message take on its machine.

    It is kept in the cache, where `tidemill plan run` and `tidemill train` find the newest one for a machine and a kind
    of run. Ten steps do; on a machine that does nothing else.

    Parameters
    ----------
    run_dir
        The directory given to `tidemill train` as --run.dir.
    """
    if out is not None and out.is_dir():
        raise UserError("that is a directory", where=f"--out {out}", cure="name a file in it")
    profile = fitted(run_dir)
    kept = kept_path(profile)
    if out is not None:  # first: where it cannot be written, nothing has changed
        write_profile(profile, out, where=f"--out {out}", cure="choose another file")
    write_profile(profile, kept)
    data = {"profile": msgspec.to_builtins(profile), "files": [str(kept), *([str(out)] if out else ())]}
    return Result(data=data, text=Group(*as_text(profile, out or kept)))


def as_text(profile: RunProfile, path: Path) -> Iterator[RenderableType]:
    """A row a number, then how well they explain the run."""
    machine, steps = profile.machine, counted(profile.steps, "step")
    rows = ((QUANTITIES[name], one) for name, one in profile.numbers.items())
    yield table(
        ("", "", "±", "of"),
        (
            [what.meaning, value(one.value, what.unit), value(one.error, what.unit), str(one.count)]
            for what, one in rows
        ),
        title=f"{profile.run}: {steps} on {machine.processor}, {counted(machine.cores, 'core')}",
    )
    yield ""
    unexplained = ", ".join(f"{percent(share)} of the time of {name}" for name, share in profile.residuals.items())
    yield from plain(f"left unexplained: {unexplained}")
    yield from plain(
        f"a step took {profile.step_s.value:.3g} s of wall time (± {profile.step_s.error:.2g}) and "
        f"{profile.step_cpu_s.value:.3g} s of CPU time; simulated on a machine that does nothing else it takes "
        f"{profile.twin_step_s:.3g} s"
    )
    yield from notes(profile.notes)
    yield from plain(f"kept in {path}")


def value(number: float, unit: str) -> str:
    """`12.3 ms`, `17 tokens`."""
    if unit != "s":
        return f"{number:.3g} {unit}".strip()
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if number * factor >= 1:
            return f"{number * factor:.3g} {name}"
    return f"{number * 1e6:.3g} µs" if number else "0"
