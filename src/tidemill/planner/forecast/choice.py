"""Which profile a recipe is forecast with, where none is named."""

from __future__ import annotations

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.planner.calibration.profile import RunProfile, kept_profiles, unlike
from tidemill.planner.forecast.forecast import FEWEST_STEPS, forecast_recipe
from tidemill.telemetry.forecast import Forecast
from tidemill.telemetry.manifest import machine

QUICK_SAMPLES = 600
"""Of one simulation when a run begins, which nobody should wait for."""
QUICK_SEEDS = 3
NAMED = 3
"""Differences told of the profile that comes nearest."""


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
    """Of a run that begins: quick, and None where nothing is known of such a run on this machine."""
    profile = next((each for each in kept_profiles(machine()) if not unlike(each, spec)), None)
    if profile is None:
        return None
    large = spec.batch.prompts * spec.batch.group_size * FEWEST_STEPS > QUICK_SAMPLES
    return forecast_recipe(spec, profile, seeds=1 if large else QUICK_SEEDS, most_samples=QUICK_SAMPLES)
