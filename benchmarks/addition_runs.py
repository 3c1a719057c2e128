"""Training runs from the common start, reduced to the figures that benchmarks compare."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from benchmarks.measuring import RESULTS
from benchmarks.origin import origin, with_origin
from benchmarks.sft_start import learning_spec, sft_start
from benchmarks.subjects import check_counts, check_different, check_equal
from tidemill.core.records import Record
from tidemill.jobs.train import train
from tidemill.telemetry.events import read_events
from tidemill.telemetry.metrics import STEP_TIME, MetricLine, read_metrics
from tidemill.telemetry.run_data import evaluations
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.statistics import Interval

TARGET = 0.9
BIN = 10  # steps averaged into one figure
DIGITS = 5  # digits kept
# Two-sided 95 % quantiles of Student's t by degrees of freedom (Student 1908).
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


class AdditionRun(Record):
    """One run of one case."""

    case: str
    seed: int
    steps: int
    learning_rate: float
    optimizer_steps: int
    accuracy: dict[int, float]  # greedy, on held-out sums, by step
    n: int  # held-out sums
    steps_to_target: float | None  # see `reached_at`; None if never
    seconds_to_target: float | None  # wall time of the steps, without evaluation
    step_s: float  # median wall time of a step
    cpu_s: float  # of the whole run in this process, including evaluations and start
    means: dict[str, float]  # of a metric over all steps
    binned: dict[str, list[float]]  # of a metric over every `BIN` steps, in their order
    origin: dict[str, Any] = {}  # of the command that measured it


def addition_run(
    start: Path, case: str, *, seed: int, steps: int, changes: dict[str, Any], metrics: Sequence[str]
) -> AdditionRun:
    """Train in this process, which must do nothing else meanwhile.

    Args:
        changes: to the common settings (see `benchmarks.sft_start`).
        metrics: metrics to keep per step.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the run is discarded.
    """
    with tempfile.TemporaryDirectory(prefix="tidemill-addition-") as folder:
        spec = learning_spec(start, Path(folder) / "run", seed=seed, steps=steps, changes=changes)
        began_s = time.process_time()
        if train(spec, telemetry_stream=io.StringIO())["interrupted"]:
            raise KeyboardInterrupt  # the run handled the signal; a partial run is not a measurement
        cpu_s = time.process_time() - began_s
        run = RunDirectory(spec.directory)
        lines = read_metrics(run.metrics)
        found = evaluations(read_events(run.events), lines)
    accuracy = {one.step: one.greedy_accuracy for one in found if one.greedy_accuracy is not None}
    reached, of_steps = reached_at(accuracy, TARGET), [line for line in lines if line.step > 0]
    return AdditionRun(
        case=case,
        seed=seed,
        steps=steps,
        learning_rate=spec.optimizer.learning_rate,
        optimizer_steps=sum(line.optimizer_steps for line in of_steps),
        accuracy={step: _rounded(share) for step, share in accuracy.items()},
        n=found[-1].n,
        steps_to_target=None if reached is None else _rounded(reached),
        seconds_to_target=None if reached is None else _rounded(_seconds_until(of_steps, reached)),
        step_s=_rounded(median(line.values[STEP_TIME] for line in of_steps)),
        cpu_s=_rounded(cpu_s),
        means={name: _mean(of_steps, name) for name in metrics},
        binned={
            name: [_mean(of_steps[at : at + BIN], name) for at in range(0, len(of_steps), BIN)] for name in metrics
        },
        origin=origin(),
    )


def check_distinct(runs: Sequence[AdditionRun]) -> None:
    """Raises RuntimeError: two cases of a seed learned in exactly the same way, so their settings had no effect."""
    for seed in sorted({run.seed for run in runs}):
        curves = {f"{run.case}, seed {seed}": (run.accuracy, run.binned) for run in runs if run.seed == seed}
        check_different("curves", curves)


def measured(
    name: str,
    settings: object,
    wanted: Sequence[tuple[str, int]],
    *,
    again: bool,
    run: Callable[[Path, str, int], AdditionRun],
    write: Callable[[Sequence[AdditionRun]], None],
) -> list[AdditionRun]:
    """Run the wanted (case, seed) pairs that results/NAME.json lacks under the same settings, or all of them.

    Args:
        run: called with (start, case, seed).
        write: called with all results after each run, so that a benchmark can be stopped at any time.

    Returns:
        All results, including earlier ones.
    """
    known = {(one.case, one.seed): one for one in earlier_runs(name, settings)}
    missing = [one for one in wanted if again or one not in known]
    start = sft_start() if missing else None
    for case, seed in missing:
        assert start is not None
        known[case, seed] = found = run(start, case, seed)
        last = found.accuracy[max(found.accuracy)]
        print(f"{case}, seed {seed}: accuracy {last:.3f}, {found.cpu_s:.0f} CPU s", flush=True)
        write(list(known.values()))
    return list(known.values())


def earlier_runs(name: str, settings: object) -> list[AdditionRun]:
    """Runs in results/NAME.json with exactly these settings."""
    path = RESULTS / f"{name}.json"
    try:
        found = msgspec.json.decode(path.read_bytes())
        if found["settings"] != msgspec.to_builtins(settings):
            return []
        runs = [with_origin(run, path, found) for run in found["runs"]]
        return msgspec.convert(runs, list[AdditionRun], str_keys=True)
    except (OSError, KeyError, TypeError, msgspec.MsgspecError):
        return []


def of_case(runs: Iterable[AdditionRun], case: str) -> list[AdditionRun]:
    """Its runs, by seed."""
    return sorted((run for run in runs if run.case == case), key=lambda run: run.seed)


def check_start(runs: Sequence[AdditionRun]) -> None:
    """All runs must have the same accuracy before the first step, below the target.

    Raises:
        RuntimeError: otherwise.
    """
    check_counts("the start", runs=len(runs))
    check_equal("accuracies before the first step", {f"{run.case}, seed {run.seed}": run.accuracy[0] for run in runs})
    if runs[0].accuracy[0] >= TARGET:
        raise RuntimeError(f"the runs start at an accuracy of {runs[0].accuracy[0]}: nothing is left to learn")


def reached_at(accuracy: Mapping[int, float], target: float) -> float | None:
    """The step at which the accuracy first reached `target`, interpolated linearly; None if never."""
    before: tuple[int, float] | None = None
    for step in sorted(accuracy):
        share = accuracy[step]
        if share >= target:
            if before is None:
                return float(step)
            return before[0] + (target - before[1]) / (share - before[1]) * (step - before[0])
        before = (step, share)
    return None


def interval(values: Iterable[float]) -> Interval:
    """Mean over seeds and its 95 % interval by Student's t; of one value the interval is that value.

    Raises:
        ValueError: no value, or more than ten.
    """
    items = np.array(list(values), dtype=np.float64)
    if not 0 < len(items) <= 10:
        raise ValueError(f"{len(items)} values")
    mean = float(items.mean())
    if len(items) == 1:
        return Interval(mean, mean, mean)
    half = T_95[len(items) - 1] * float(items.std(ddof=1)) / len(items) ** 0.5
    return Interval(mean, mean - half, mean + half)


def mean_accuracy(runs: Sequence[AdditionRun]) -> dict[float, Interval]:
    """Over seeds, at the steps that all evaluated."""
    steps = set.intersection(*(set(run.accuracy) for run in runs))
    return {float(step): interval(run.accuracy[step] for run in runs) for step in sorted(steps)}


def mean_binned(runs: Sequence[AdditionRun], metric: str) -> dict[float, Interval]:
    """Over seeds, by the middle of each bin."""
    of_runs = zip(*(run.binned[metric] for run in runs), strict=True)
    return {(at + 0.5) * BIN: interval(values) for at, values in enumerate(of_runs)}


def spread(values: Iterable[float | None], digits: int) -> str:
    """Mean and extremes of the present values; a dash without values."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.{digits}f} ({min(known):.{digits}f}-{max(known):.{digits}f})" if known else "-"


def told_seeds(counts: Iterable[int]) -> str:
    """Describe the number of seeds of a figure."""
    fewest, most = min(found := list(counts)), max(found)
    words = f"{most}" if fewest == most else f"{fewest} to {most}"
    return "1 seed" if most == 1 else f"means of {words} seeds, bands 95 %"


def _seconds_until(lines: Sequence[MetricLine], step: float) -> float:
    """Wall time of the steps up to a moment that may lie within a step."""
    return sum(line.values[STEP_TIME] * min(1.0, max(0.0, step - line.step + 1)) for line in lines)


def _mean(lines: Sequence[MetricLine], name: str) -> float:
    """Mean over the steps that have the metric, at least one."""
    values = [line.values[name] for line in lines if name in line.values]
    if not values:
        raise KeyError(name)
    return _rounded(fmean(values))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
