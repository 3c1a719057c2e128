"""`tidemill calibrate`: a run's profile, the numbers included that only its own simulation can tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.planner.calibration.fit import fit
from tidemill.planner.calibration.observed import Observed, observe
from tidemill.planner.calibration.profile import Measure, RunProfile, fault
from tidemill.planner.forecast.twin import simulate_recipe
from tidemill.sim.outcome import SimulatedRun
from tidemill.telemetry.events import JOIN
from tidemill.telemetry.fleet_figures import amount
from tidemill.telemetry.metrics import STEP_TIME, MetricLine

MOST_STEPS = 60
"""Of the run, simulated to find what is left over."""
ROUNDS = 6
NEAR = 0.002
"""Relative difference of step times that is as good as none."""
FIRST_TRIAL = 0.1
"""Of what a step's time lacks, as the first guess of one message's."""


def calibrate(run_dir: Path) -> RunProfile:
    """
    Raises:
        UserError: there is no run, it says too little, or what cannot have been.
    """
    observed = observe(run_dir)
    profile = fit(observed)
    if wrong := fault(profile):
        raise UserError(f"its logs are damaged: {wrong}", where=str(run_dir), cure="calibrate on another run")
    return settle(profile, observed)


def settle(profile: RunProfile, observed: Observed) -> RunProfile:
    """With the time of a message such that the run's simulation takes as long for a step as the run did without its
    waits for a processor, and boots such that its workers join as fast: what they take by themselves does not show
    where everything shares cores."""
    spec = shortened(observed.spec, len(observed.metrics))
    target_s = fmean(observed.unhindered_step_s(spec.trainer.steps))
    tried: list[tuple[float, float]] = []  # (call_s, step_s)
    joined_s = observed.joins_s
    for _ in range(ROUNDS):
        run = simulate_recipe(spec, profile)
        step_s = _step_s(run.metrics, observed)
        tried.append((profile["call_s"], step_s))
        profile = msgspec.structs.replace(profile, twin_step_s=step_s)
        boots = _joins_s(run)
        boots_right = not (joined_s and boots) or abs(median(boots) / median(joined_s) - 1) < 0.05
        calls_right = abs(step_s - target_s) <= NEAR * target_s or (profile["call_s"] == 0 and step_s > target_s)
        if boots_right and calls_right:
            break
        changed = dict(profile.numbers)
        if not boots_right:
            boot, factor = profile.numbers["boot_s"], median(joined_s) / median(boots)
            changed["boot_s"] = msgspec.structs.replace(boot, value=boot.value * factor, error=boot.error * factor)
        if not calls_right:
            changed["call_s"] = Measure(value=_next_trial(tried, target_s), error=0.0, count=profile.step_s.count)
        profile = msgspec.structs.replace(profile, numbers=changed)
    return profile


def shortened(spec: RunSpec, steps: int) -> RunSpec:
    """The same for so many steps, and not for longer than is simulated here."""
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"steps": min(steps, MOST_STEPS)})})


def _next_trial(tried: list[tuple[float, float]], target_s: float) -> float:
    """By the secant through the last two trials."""
    (last, last_s) = tried[-1]
    if len(tried) == 1:
        return FIRST_TRIAL * max(0.0, target_s - last_s)
    before, before_s = next(((c, s) for c, s in reversed(tried[:-1]) if c != last), (0.0, tried[0][1]))
    slope = (last_s - before_s) / (last - before) if last != before else 0.0
    return max(0.0, last + (target_s - last_s) / slope) if slope > 0 else last


def _step_s(lines: Iterable[MetricLine], observed: Observed) -> float:
    times = [
        line.values[STEP_TIME]
        for line in lines
        if line.step not in observed.first_steps and line.step > 0 and STEP_TIME in line.values
    ]
    return fmean(times)


def _joins_s(run: SimulatedRun) -> list[float]:
    return [amount(event, "duration_s") for event in run.events if event["event"] == JOIN and "error" not in event]
