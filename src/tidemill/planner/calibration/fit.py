"""Fits the profile of a machine to the logs of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from msgspec.structs import replace

from tidemill.config.schema import RunSpec
from tidemill.hardware.measured_profile import Packing
from tidemill.hardware.run_profile import FORMAT, Machine, Measure, RunProfile, cost_settings
from tidemill.planner.calibration.least_squares import MAD_TO_DEVIATION, Solution, solve, solve_with_few
from tidemill.planner.calibration.run_observations import PASSES, TRAINING, Observed, observe
from tidemill.sim.one_machine import simulate_recipe
from tidemill.telemetry.events import JOIN
from tidemill.telemetry.fleet_figures import amount
from tidemill.telemetry.metrics import PEAK_RSS, STEP_TIME, MetricLine

ENGINE = {
    "passes": "engine_pass_s",
    "rows": "engine_row_s",
    "prefilled": "engine_prefill_token_s",
    "drawn": "engine_drawn_s",
    "context_tokens": "engine_context_token_s",
}
LEARNING = {"optimizer_steps": "train_step_s", "tokens_packed": "train_token_s", "pairs_packed": "train_pair_s"}
WORDS = {
    "passes": "passes",
    "rows": "the number of running samples",
    "prefilled": "the length of prompts",
    "drawn": "the number of sampled tokens",
    "context_tokens": "the length of contexts",
    "optimizer_steps": "optimizer steps",
    "tokens_packed": "the number of tokens",
    "pairs_packed": "the square of the tokens of a microbatch",
}


def fit(observed: Observed) -> RunProfile:
    """Fit everything except `call_s`, which is 0, and boot times that shared the machine's cores."""
    engine = solve(PASSES, *observed.engine_work)
    training = solve_with_few(TRAINING, *observed.training(observed.usual))
    new_by_depth = observed.new_by_depth()
    hardware = observed.manifest.sessions[-1].machine
    return RunProfile(
        format=FORMAT,
        run=observed.spec.run.name,
        run_id=observed.manifest.run_id,
        steps=len(observed.metrics),
        settings=cost_settings(observed.spec),
        machine=Machine(
            processor=hardware.processor,
            cores=hardware.cores,
            device=str(observed.machine.get("device", "")),
            threads=int(observed.machine.get("threads") or 1),
        ),
        numbers={
            **_measures(engine, ENGINE),
            **_measures(training, LEARNING),
            "train_first_s": _first(observed, training),
            **_latencies(observed),
            **_amounts(observed, new_by_depth),
        },
        new_by_depth=new_by_depth,
        lengths=_histogram(sample.length for sample in observed.samples),
        cut=_histogram(sample.length for sample in observed.samples if sample.finish == "length"),
        held_out_lengths=_histogram(sample.length for sample in observed.held_out),
        step_s=_mean(observed.step_s),
        step_cpu_s=_mean(observed.step_cpu_s),
        simulated_step_s=0.0,
        residuals={"engine": engine.residual, "training": training.residual},
        processor_share=min(1.0, observed.processor_share),
        notes=(
            *_merged_costs_note(engine, "an engine's time"),
            *_merged_costs_note(training, "training's time"),
            *_unobserved_notes(observed),
        ),
    )


def _measures(solution: Solution, names: dict[str, str]) -> dict[str, Measure]:
    return {
        name: Measure(value=solution.values[cause], error=solution.errors[cause], count=solution.count)
        for cause, name in names.items()
    }


def _merged_costs_note(solution: Solution, of: str) -> list[str]:
    causes = " and ".join(WORDS[cause] for cause in solution.merged)
    return [f"{of}: {causes} did not vary independently, so their costs are merged"] if causes else []


def _first(observed: Observed, solution: Solution) -> Measure:
    """Additional time of first steps, beyond their work."""
    lines = [line for line in observed.metrics if line.step in observed.first_steps]
    amounts, seconds = observed.training(lines)
    usual = amounts @ [solution.values[cause] for cause in TRAINING]
    return _median([max(0.0, float(extra)) for extra in seconds - usual])


def _latencies(observed: Observed) -> dict[str, Measure]:
    fetching, swapping = zip(*observed.pulls_s, strict=True) if observed.pulls_s else ((), ())
    return {
        "controller_sample_s": _median(observed.controller_s),
        "call_s": Measure(value=0.0, error=0.0, count=0),
        "publish_s": _median(observed.publish_s),
        "pull_s": _median(fetching),
        "swap_s": _median(swapping),
        "boot_s": _median(observed.boots_s),
        "checkpoint_s": _median(observed.checkpoint_s),
        "start_s": Measure(value=amount(observed.machine, "elapsed_s"), error=0.0, count=1),
    }


def _amounts(observed: Observed, new_by_depth: tuple[float, ...]) -> dict[str, Measure]:
    """Amounts of work; those of training are scaled so that the mean over the run equals the observed one."""
    batch, metrics = observed.spec.batch, observed.metrics

    def total(name: str) -> float:
        return sum(line.values.get(name, 0.0) for line in metrics)

    groups = total("samples") / batch.group_size
    skipped = total("groups_without_signal") + total("groups_skipped_invalid")
    learned = 1.0 if observed.spec.algorithm.kl_beta > 0 else 1 - skipped / groups
    own = Packing(prompt_tokens=0.0, new_by_depth=new_by_depth, learned_share=1.0)
    completions = own.packed([sample.length for sample in observed.samples])
    completions_of_group = completions / max(len(observed.samples) / batch.group_size, 1)
    packed_of_group = total("tokens_packed") / batch.epochs / groups
    numbers = {
        "peak_rss_bytes": max(line.values.get(PEAK_RSS, 0.0) for line in metrics),
        "held_out_prompts": max((amount(event, "n") for event in observed.evaluations), default=0.0),
        "prompt_tokens": observed.prompt_tokens,
        "prompt_new_share": observed.new_prompt_share,
        "packed_prompt_tokens": max(0.0, packed_of_group / learned - completions_of_group) if learned else 0.0,
        "learned_share": learned,
    }
    return {name: Measure(value=value, error=0.0, count=len(metrics)) for name, value in numbers.items()}


def _unobserved_notes(observed: Observed) -> list[str]:
    notes = []
    if not observed.checkpoint_s:
        notes.append("no checkpoint was written; checkpoints are assumed to take no time")
    if not observed.joins_s:
        notes.append("no preemptible worker joined; boots and pulls are assumed to take no time")
    if observed.on_processor and not observed.quiet:
        share = f"{observed.processor_share:.0%}".replace("%", " %")
        notes.append(
            f"the machine was busy, or had many engines: they were on a processor for {share} of their time; fitted "
            "times are processor times"
        )
    return notes


def _histogram(lengths: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(lengths).items()))


def _mean(values: Sequence[float]) -> Measure:
    count = len(values)
    error = stdev(values) / count**0.5 if count > 1 else 0.0
    return Measure(value=fmean(values) if values else 0.0, error=error, count=count)


def _median(values: Sequence[float]) -> Measure:
    """Median with its standard error, estimated from the median absolute deviation of a normal distribution."""
    if not values:
        return Measure(value=0.0, error=0.0, count=0)
    middle = median(values)
    deviation = MAD_TO_DEVIATION * median(abs(value - middle) for value in values)
    return Measure(value=middle, error=1.2533 * deviation / len(values) ** 0.5, count=len(values))


MOST_STEPS = 60
"""Maximum number of steps to simulate when fitting call_s."""
ROUNDS = 6
NEAR = 0.002
"""Relative tolerance of step times."""
FIRST_TRIAL = 0.1
"""First guess of call_s, as a fraction of the unexplained step time."""


def calibrate(run_dir: Path) -> RunProfile:
    """Fit a profile to a run.

    Raises:
        UserError: there is no run, its logs are incomplete or damaged.
    """
    observed = observe(run_dir)
    return fit_by_simulation(fit(observed), observed)


def fit_by_simulation(profile: RunProfile, observed: Observed) -> RunProfile:
    """Fit `call_s` and boot times by simulation.

    `call_s` is chosen so that a simulated step takes as long as a step of the run without its waits for a
    processor; boot times so that simulated workers join as fast. Neither can be read from the logs where parts
    share cores.
    """
    spec = shortened(observed.spec, len(observed.metrics))
    target_s = fmean(observed.unhindered_step_s(spec.trainer.steps))
    tried: list[tuple[float, float]] = []  # (call_s, step_s)
    joined_s = observed.joins_s
    for _ in range(ROUNDS):
        run = simulate_recipe(spec, profile)
        step_s = _step_s(run.metrics, observed)
        tried.append((profile["call_s"], step_s))
        profile = replace(profile, simulated_step_s=step_s)
        boots = [amount(event, "duration_s") for event in run.events if event["event"] == JOIN and "error" not in event]
        boots_right = not (joined_s and boots) or abs(median(boots) / median(joined_s) - 1) < 0.05
        calls_right = abs(step_s - target_s) <= NEAR * target_s or (profile["call_s"] == 0 and step_s > target_s)
        if boots_right and calls_right:
            break
        changed = dict(profile.numbers)
        if not boots_right:
            boot, factor = profile.numbers["boot_s"], median(joined_s) / median(boots)
            changed["boot_s"] = replace(boot, value=boot.value * factor, error=boot.error * factor)
        if not calls_right:
            changed["call_s"] = Measure(value=_next_trial(tried, target_s), error=0.0, count=profile.step_s.count)
        profile = replace(profile, numbers=changed)
    return profile


def shortened(spec: RunSpec, steps: int) -> RunSpec:
    """The recipe with fewer steps."""
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"steps": min(steps, MOST_STEPS)})})


def _next_trial(tried: list[tuple[float, float]], target_s: float) -> float:
    """The next value by the secant through the last two."""
    (last, last_s) = tried[-1]
    if len(tried) == 1:
        return FIRST_TRIAL * max(0.0, target_s - last_s)
    before, before_s = next(((c, s) for c, s in reversed(tried[:-1]) if c != last), (0.0, tried[0][1]))
    slope = (last_s - before_s) / (last - before) if last != before else 0.0
    return max(0.0, last + (target_s - last_s) / slope) if slope > 0 else last


def _step_s(lines: Iterable[MetricLine], observed: Observed) -> float:
    usual = (line.values for line in lines if line.step not in observed.first_steps and line.step > 0)
    return fmean(values[STEP_TIME] for values in usual if STEP_TIME in values)
