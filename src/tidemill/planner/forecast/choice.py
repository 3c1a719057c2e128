"""Which profile a recipe is forecast with, where none is named."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, UserError
from tidemill.planner.calibration.profile import RunProfile, kept_profiles, unlike
from tidemill.planner.forecast.forecast import FEWEST_STEPS, forecast_recipe
from tidemill.telemetry.forecast import Forecast
from tidemill.telemetry.manifest import machine

QUICK_SAMPLES = 600
"""Of one simulation when a run begins, which nobody should wait for."""
QUICK_SEEDS = 3
QUICK_S = 5.0
"""Of all of them together, whatever a recipe and a profile make of a simulation."""
NAMED = 3
"""Differences told of the profile that comes nearest."""


class TooSlow(TidemillError):
    """A simulation took longer than anybody should wait for it."""


def fitting_profile(spec: RunSpec) -> RunProfile:
    """The newest one of this machine and of runs like this.

    Raises:
        UserError: there is none; it says how to get one.
    """
    kept = kept_profiles(machine())
    for profile in kept:
        if not unlike(profile, spec):
            return profile
    cure = (
        "let the recipe train for ten steps and `tidemill calibrate` its run directory; or give --measure, which does "
        "so, --profile FILE, or --machines"
    )
    if not kept:
        raise UserError("no run of this machine was calibrated yet", where="plan run", cure=cure)
    nearest = min(kept, key=lambda profile: len(unlike(profile, spec)))
    differences = "; ".join(unlike(nearest, spec)[:NAMED])
    raise UserError(f"no run like this one was calibrated on this machine ({differences})", where="plan run", cure=cure)


def foretell(spec: RunSpec) -> Forecast | None:
    """Of a run that begins: quick, and None where nothing is known of such a run on this machine.

    Raises:
        TooSlow: it is not there soon.
    """
    profile = next((each for each in kept_profiles(machine()) if not unlike(each, spec)), None)
    if profile is None:
        return None
    large = spec.batch.prompts * spec.batch.group_size * FEWEST_STEPS > QUICK_SAMPLES
    seeds = 1 if large else QUICK_SEEDS
    return forecast_recipe(spec, profile, seeds=seeds, most_samples=QUICK_SAMPLES, watch=_no_longer_than(QUICK_S))


def _no_longer_than(seconds: float) -> Callable[[], None]:
    """Raises TooSlow when called after so long."""
    ends_s = time.monotonic() + seconds

    def watch() -> None:
        if time.monotonic() > ends_s:
            raise TooSlow(f"simulating the run takes longer than {seconds:g} s; `tidemill plan run` has no such limit")

    return watch
