"""The forecast of a recipe from several simulations: each with other samples, and with numbers as uncertain as the
profile says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.config.words import counted
from tidemill.planner.calibration.profile import RunProfile
from tidemill.planner.forecast.twin import simulate_recipe
from tidemill.sim.outcome import SimulatedRun
from tidemill.telemetry.events import CHECKPOINT, EVALUATION, PUBLISH
from tidemill.telemetry.fleet_figures import amount
from tidemill.telemetry.forecast import FORMAT, Forecast, Spread
from tidemill.telemetry.metrics import STEP_TIME, TRAINER_IDLE

SEEDS = 5
MOST_SAMPLES = 8000
"""Of one simulation: a second or three."""
FEWEST_STEPS = 2
"""The first, and a usual one."""
DEVIATIONS = 2.0


def forecast_recipe(
    spec: RunSpec,
    profile: RunProfile,
    *,
    seeds: int = SEEDS,
    most_samples: int = MOST_SAMPLES,
    watch: Callable[[], None] | None = None,
) -> Forecast:
    """What a recipe takes on the machine of a profile.

    Args:
        watch: see `simulate_recipe`.
    """
    steps = simulated_steps(spec, most_samples)
    runs = [simulate_recipe(drawn(spec, steps, seed), uncertain(profile, seed), watch=watch) for seed in range(seeds)]
    notes = list(profile.notes)
    if steps < spec.trainer.steps:
        notes.append(f"{steps} of {spec.trainer.steps} steps were simulated, and the others taken to be like them")
    about = f"a profile of {profile.run}, {counted(profile.steps, 'step')} on {counted(profile.machine.cores, 'core')}"
    return summarised(spec, runs, start_s=profile["start_s"], about=about, notes=notes)


def simulated_steps(spec: RunSpec, most_samples: int) -> int:
    """As many as so many samples make."""
    return min(spec.trainer.steps, max(FEWEST_STEPS, most_samples // (spec.batch.prompts * spec.batch.group_size)))


def uncertain(profile: RunProfile, seed: int) -> RunProfile:
    """The profile with its numbers drawn within their errors, never negative; as it is for the first seed."""
    if seed == 0:
        return profile
    rng = random.Random(seed)
    numbers = {
        name: msgspec.structs.replace(one, value=max(0.0, rng.gauss(one.value, one.error)))
        for name, one in profile.numbers.items()
    }
    return msgspec.structs.replace(profile, numbers=numbers)


def drawn(spec: RunSpec, steps: int, seed: int) -> RunSpec:
    """The recipe with other samples, for so many steps."""
    run = spec.run.model_copy(update={"seed": spec.run.seed + seed})
    return spec.model_copy(update={"run": run, "trainer": spec.trainer.model_copy(update={"steps": steps})})


def summarised(
    spec: RunSpec, runs: Sequence[SimulatedRun], *, start_s: float, about: str, notes: Sequence[str]
) -> Forecast:
    """
    Args:
        runs: of one recipe, each for as many of its steps.
        start_s: before the controller's loop.
    """
    steps = [[line for line in run.metrics if line.step > 0] for run in runs]
    simulated = len(steps[0])
    usual = [fmean(line.values[STEP_TIME] for line in lines[1:] or lines) for lines in steps]
    beside = {
        "evaluation": fmean(_beside(run, EVALUATION, spec) for run in runs),
        "checkpoints": fmean(_beside(run, CHECKPOINT, spec) for run in runs),
    }
    totals = [
        start_s
        + sum(line.values[STEP_TIME] for line in lines)
        + mean * (spec.trainer.steps - simulated)
        + _beside(run, EVALUATION, spec)
        + _beside(run, CHECKPOINT, spec)
        for run, lines, mean in zip(runs, steps, usual, strict=True)
    ]
    tokens = fmean(sum(line.values.get("tokens_generated", 0.0) for line in lines) for lines in steps)
    return Forecast(
        format=FORMAT,
        profile=about,
        seeds=len(runs),
        steps=spec.trainer.steps,
        step_s=tuple(_spread([lines[at].values[STEP_TIME] for lines in steps]) for at in range(simulated)),
        usual_step_s=_spread(usual),
        total_s=_spread(totals),
        split_s=_split(runs),
        generating_s=_mean_of_usual(runs, "time_rollout_s"),
        beside_s={"start": start_s, **beside},
        tokens_per_s=tokens / fmean(sum(line.values[STEP_TIME] for line in lines) for lines in steps),
        cost_usd=fmean(run.cost_usd / run.seconds * total for run, total in zip(runs, totals, strict=True)),
        notes=tuple(notes),
    )


def _split(runs: Sequence[SimulatedRun]) -> dict[str, float]:
    """Of a usual step, what the trainer did, one after another."""
    learning_s, waiting_s = (_mean_of_usual(runs, name) for name in ("time_train_s", TRAINER_IDLE))
    publish_s = fmean(amount(event, "duration_s") for run in runs for event in _named(run, PUBLISH))
    rest_s = max(0.0, _mean_of_usual(runs, STEP_TIME) - learning_s - waiting_s - publish_s)
    return {"waiting for samples": waiting_s, "learning": learning_s, "publishing": publish_s, "rest": rest_s}


def _mean_of_usual(runs: Sequence[SimulatedRun], name: str) -> float:
    lines = [line for run in runs for line in run.metrics if line.step > 1] or [runs[0].metrics[-1]]
    return fmean(line.values.get(name, 0.0) for line in lines)


def _beside(run: SimulatedRun, name: str, spec: RunSpec) -> float:
    """Seconds of evaluations or checkpoints in the whole run, where only its beginning was simulated."""
    durations = [amount(event, "duration_s") for event in _named(run, name)]
    if not durations:
        return 0.0
    every, steps = (
        {EVALUATION: spec.eval.every_steps, CHECKPOINT: spec.checkpoint.every_steps}[name],
        spec.trainer.steps,
    )
    count = (steps - 1) // every if every else 0  # before the end
    count += 2 if name == EVALUATION else 1
    return fmean(durations) * count


def _named(run: SimulatedRun, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == name]


def _spread(values: Sequence[float]) -> Spread:
    mean = fmean(values)
    beside = DEVIATIONS * stdev(values) if len(values) > 1 else 0.0
    return Spread(mean=mean, low=max(0.0, mean - beside), high=mean + beside)
