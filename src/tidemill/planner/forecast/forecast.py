"""Forecast of a recipe on this machine from several simulations, with uncertainty, derivation and memory."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from msgspec.structs import replace

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, UserError
from tidemill.core.formatting import counted
from tidemill.hardware.figures import Derivation
from tidemill.hardware.process_memory import (
    LIBRARIES,
    Lengths,
    Models,
    element_bytes,
    engine_cache,
    microbatch,
    rl_states,
)
from tidemill.hardware.run_profile import RunProfile, kept_profiles, setting_differences
from tidemill.sim.one_machine import simulate_recipe
from tidemill.sim.outcome import SimulatedRun
from tidemill.telemetry.events import CHECKPOINT, EVALUATION, PUBLISH
from tidemill.telemetry.fleet_figures import amount
from tidemill.telemetry.manifest import FORECAST_FORMAT, Forecast, Spread, machine
from tidemill.telemetry.metrics import STEP_TIME, TRAINER_IDLE

SEEDS = 5
MOST_SAMPLES = 8000
"""Samples per simulation, which take one to three seconds."""
FEWEST_STEPS = 2
"""The first step, which warms up, and one other."""
DEVIATIONS = 2.0


def forecast_recipe(
    spec: RunSpec,
    profile: RunProfile,
    *,
    seeds: int = SEEDS,
    most_samples: int = MOST_SAMPLES,
    watch: Callable[[], None] | None = None,
) -> Forecast:
    """Forecast a recipe on the machine of a profile; `watch` is that of `simulate_recipe`."""
    steps = simulated_steps(spec, most_samples)
    runs = [
        simulate_recipe(with_seed(spec, steps, seed), uncertain(profile, seed), watch=watch) for seed in range(seeds)
    ]
    notes = [*profile.notes, *unsimulated(spec, steps)]
    about = f"a profile of {profile.run}, {counted(profile.steps, 'step')} on {counted(profile.machine.cores, 'core')}"
    return summarised(spec, runs, start_s=profile["start_s"], about=about, notes=notes)


def simulated_steps(spec: RunSpec, most_samples: int) -> int:
    """The number of steps with at most `most_samples` samples."""
    return min(spec.trainer.steps, max(FEWEST_STEPS, most_samples // (spec.batch.prompts * spec.batch.group_size)))


def unsimulated(spec: RunSpec, steps: int) -> list[str]:
    """A note on the steps that were not simulated; empty if all were."""
    note = f"{steps} of {spec.trainer.steps} steps were simulated; the others are assumed to be equal on average"
    return [note] if steps < spec.trainer.steps else []


def uncertain(profile: RunProfile, seed: int) -> RunProfile:
    """The profile with its numbers drawn from normal distributions, at least 0; unchanged for seed 0."""
    if seed == 0:
        return profile
    rng = random.Random(seed)
    numbers = {
        name: replace(one, value=max(0.0, rng.gauss(one.value, one.error))) for name, one in profile.numbers.items()
    }
    return replace(profile, numbers=numbers)


def with_seed(spec: RunSpec, steps: int, seed: int) -> RunSpec:
    """The recipe with another seed and number of steps."""
    run = spec.run.model_copy(update={"seed": spec.run.seed + seed})
    return spec.model_copy(update={"run": run, "trainer": spec.trainer.model_copy(update={"steps": steps})})


def summarised(
    spec: RunSpec, runs: Sequence[SimulatedRun], *, start_s: float, about: str, notes: Sequence[str]
) -> Forecast:
    """Combine simulations to a forecast.

    Args:
        runs: simulations of one recipe with the same number of steps.
        start_s: time before the controller's loop, in seconds.
    """
    steps = [[line for line in run.metrics if line.step > 0] for run in runs]
    simulated = len(steps[0])
    usual = [fmean(line.values[STEP_TIME] for line in lines[1:] or lines) for lines in steps]
    evaluation_s = [_extrapolated_s(run, EVALUATION, spec) for run in runs]
    checkpoint_s = [_extrapolated_s(run, CHECKPOINT, spec) for run in runs]
    totals = [
        start_s
        + sum(line.values[STEP_TIME] for line in lines)
        + mean * (spec.trainer.steps - simulated)
        + evaluating
        + saving
        for lines, mean, evaluating, saving in zip(steps, usual, evaluation_s, checkpoint_s, strict=True)
    ]
    learning_s, waiting_s = (_mean_of_usual(runs, name) for name in ("time_train_s", TRAINER_IDLE))
    publish_s = fmean(amount(event, "duration_s") for run in runs for event in _named(run, PUBLISH))
    rest_s = max(0.0, _mean_of_usual(runs, STEP_TIME) - learning_s - waiting_s - publish_s)
    tokens = fmean(sum(line.values.get("tokens_generated", 0.0) for line in lines) for lines in steps)
    return Forecast(
        format=FORECAST_FORMAT,
        profile=about,
        seeds=len(runs),
        steps=spec.trainer.steps,
        step_s=tuple(_spread([lines[at].values[STEP_TIME] for lines in steps]) for at in range(simulated)),
        usual_step_s=_spread(usual),
        total_s=_spread(totals),
        split_s={"waiting for samples": waiting_s, "learning": learning_s, "publishing": publish_s, "rest": rest_s},
        generating_s=_mean_of_usual(runs, "time_rollout_s"),
        outside_steps_s={"start": start_s, "evaluation": fmean(evaluation_s), "checkpoints": fmean(checkpoint_s)},
        tokens_per_s=tokens / fmean(sum(line.values[STEP_TIME] for line in lines) for lines in steps),
        cost_usd=fmean(run.cost_usd / run.seconds * total for run, total in zip(runs, totals, strict=True)),
        notes=tuple(notes),
    )


def _mean_of_usual(runs: Sequence[SimulatedRun], name: str) -> float:
    lines = [line for run in runs for line in run.metrics if line.step > 1] or [runs[0].metrics[-1]]
    return fmean(line.values.get(name, 0.0) for line in lines)


def _extrapolated_s(run: SimulatedRun, name: str, spec: RunSpec) -> float:
    """Time of all evaluations or checkpoints of the whole run, extrapolated from the simulated steps, in seconds."""
    events = _named(run, name)
    if not events:
        return 0.0
    times = len({event["step"] for event in events})  # an evaluation has one event per set
    every = spec.eval.every_steps if name == EVALUATION else spec.checkpoint.every_steps
    count = (spec.trainer.steps - 1) // every if every else 0  # before the last step
    count += 2 if name == EVALUATION else 1
    return math.fsum(amount(event, "duration_s") for event in events) / times * count


def _named(run: SimulatedRun, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == name]


def _spread(values: Sequence[float]) -> Spread:
    mean = fmean(values)
    beside = DEVIATIONS * stdev(values) if len(values) > 1 else 0.0
    return Spread(mean=mean, low=max(0.0, mean - beside), high=mean + beside)


QUICK_SAMPLES = 600
"""Samples per simulation at the start of a run, which must be quick."""
QUICK_SEEDS = 3
QUICK_S = 5.0
"""Limit for all simulations at the start of a run, in seconds."""
NAMED = 3
"""Number of differences to the nearest profile in an error message."""


class TooSlow(TidemillError):
    """A simulation exceeded its time limit."""


def fitting_profile(spec: RunSpec) -> RunProfile:
    """The newest profile of this machine and of runs like this.

    Raises:
        UserError: there is none.
    """
    kept = kept_profiles(machine())
    if fitting := next((profile for profile in kept if not setting_differences(profile, spec)), None):
        return fitting
    hint = (
        "train the recipe for ten steps and run `tidemill calibrate` on its run directory; or give --measure, which "
        "does both, --profile FILE, or --machines"
    )
    if not kept:
        raise UserError("no run on this machine has been calibrated yet", where="plan run", hint=hint)
    nearest = min(kept, key=lambda profile: len(setting_differences(profile, spec)))
    differences = "; ".join(setting_differences(nearest, spec)[:NAMED])
    what = f"no run like this one has been calibrated on this machine ({differences})"
    raise UserError(what, where="plan run", hint=hint)


def forecast_at_start(spec: RunSpec) -> Forecast | None:
    """Forecast a run that is about to start; this takes a few seconds. None if this machine has no fitting profile.

    Raises:
        TooSlow: the simulation exceeds its time limit.
    """
    profile = next((each for each in kept_profiles(machine()) if not setting_differences(each, spec)), None)
    if profile is None:
        return None
    ends_s = time.monotonic() + QUICK_S

    def watch() -> None:
        if time.monotonic() > ends_s:
            raise TooSlow(f"simulating the run takes longer than {QUICK_S:g} s; `tidemill plan run` has no such limit")

    large = spec.batch.prompts * spec.batch.group_size * FEWEST_STEPS > QUICK_SAMPLES
    return forecast_recipe(spec, profile, seeds=1 if large else QUICK_SEEDS, most_samples=QUICK_SAMPLES, watch=watch)


SIMULATED = "the run's own controller in virtual time"


def derive(forecast: Forecast, sheet: Derivation) -> None:
    """Add the figures of a forecast, from means over all simulations."""
    usual = forecast.usual_step_s.mean
    sheet.compute(
        "total_s",
        "s",
        formula="start + simulated_steps_s + (steps - simulated) * usual_step_s + evaluation + checkpoints",
        source=f"{SIMULATED}; {forecast.profile}",
        start=forecast.outside_steps_s["start"],
        simulated_steps_s=sum(step.mean for step in forecast.step_s),
        steps=forecast.steps,
        simulated=len(forecast.step_s),
        usual_step_s=usual,
        evaluation=forecast.outside_steps_s["evaluation"],
        checkpoints=forecast.outside_steps_s["checkpoints"],
    )
    for name, seconds in forecast.split_s.items():
        sheet.compute(
            f"share of {name}",
            "",
            formula="seconds / usual_step_s",
            source=f"{SIMULATED}; phases of the trainer",
            seconds=seconds,
            usual_step_s=usual,
        )
    sheet.compute(
        "cost_usd_per_hour",
        "USD/h",
        formula="3600 * cost_usd / total_s",
        source="prices of the fleet, for the time that each machine was leased",
        cost_usd=forecast.cost_usd,
        total_s=forecast.total_s.mean,
    )


def memory_on_this_machine(spec: RunSpec, models: Models, profile: RunProfile, sheet: Derivation) -> float:
    """Bytes of the training process: models, one microbatch, keys and values, and libraries."""
    on_gpu = profile.machine.device != "cpu"
    element = element_bytes(spec, on_gpu=on_gpu)
    lengths = Lengths(prompt=profile["prompt_tokens"], packed=profile["packed_prompt_tokens"])
    activations, logits = microbatch(spec, models.policy, lengths, sheet)
    return sheet.compute(
        "memory_bytes",
        "bytes",
        formula="models + activations + logits + kv + libraries",
        source="of the training process; libraries as measured on a CPU, none on a GPU",
        models=rl_states(spec, models, element, sheet).total,
        activations=activations,
        logits=logits,
        kv=engine_cache(spec, models.policy, lengths, element, sheet),
        libraries=0.0 if on_gpu else LIBRARIES,
    )
