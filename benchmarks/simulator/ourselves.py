"""Forecast errors: calibrate on one real run, predict another, and run it.

    python -m benchmarks.simulator.ourselves [--rounds 3] [--only inprocess demo ray] [--keep FOLDER]

Three pairs of runs, each predicted from the other's logs and its recipe only:

- *inprocess*: a character model; twice the batch, twice the longest completion.
- *demo*: SmolLM2 learns additions; other prompts and groups.
- *ray*: trainer and two workers as processes on this machine, killed repeatedly; a larger batch, longer completions,
another trace with more evictions.

Every round repeats each run. Reported are step time (mean, without the first) and total time (from the command to the
end of the run): the first round's forecast relative to all actual runs, and the errors of the other rounds. The aim is
10 %, or twice the standard deviation of the actual runs if larger. Use a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from benchmarks.subjects import check_counts
from benchmarks.training_run import train
from benchmarks.turns import OFFLINE, ONE_THREAD
from tidemill.config.schema import RunSpec
from tidemill.config.toml import tables_to_toml
from tidemill.planner.calibration.fit import calibrate
from tidemill.planner.forecast.forecast import forecast_recipe
from tidemill.telemetry.metrics import STEP_TIME, read_metrics
from tidemill.telemetry.run_dir import RunDirectory

AIM, DEVIATIONS = 0.10, 2.0
DEADLINE_S = 600.0
MEASURES = ("step_s", "total_s")
Sections = Mapping[str, Any]

CHAR: Sections = {
    "model": {"source": "char", "char": {"context": 128}},
    "task": {"kind": "arithmetic", "shots": 0},
    "scoring": {"rewards": [{"kind": "length", "target_tokens": 24}]},
    "engine": {"slots": 32, "tick_s": 0.05},
    # Slow learning, so that lengths stay constant: a forecast predicts time, not learning.
    "optimizer": {"learning_rate": 1e-6},
    "checkpoint": {"every_steps": 0},
    "eval": {"every_steps": 0, "prompts": 16},
    "telemetry": {"live": False},
}
SMOLLM2: Sections = {
    "model": {"source": "smollm2-135m"},
    "task": {"kind": "arithmetic", "operators": "+", "digits": 1, "shots": 2, "held_out_fraction": 0.4},
    "scoring": {"rewards": [{"kind": "exact"}]},
    "sampling": {"max_new_tokens": 3},
    "checkpoint": {"every_steps": 0},
    "eval": {"every_steps": 0},
    "telemetry": {"live": False},
}
POOL: Sections = {
    "kind": "synthetic",
    "workers": 2,
    "mean_time_to_return_s": 3.0,
    "burst": 0.2,
    "noticed": 0.5,
    "notice_s": 2.0,
}
RAY: Sections = {
    **CHAR,
    "runtime": "ray",
    "engine": {"slots": 8, "tick_s": 0.1},
    "fleet": {"seed_window_s": 0.2, "reserved_usd_per_hour": 1.2, "preemptible_usd_per_hour": 0.4},
}

PAIRS: dict[str, tuple[Sections, Sections]] = {
    "inprocess": (
        {
            **CHAR,
            "batch": {"prompts": 8, "group_size": 8},
            "sampling": {"max_new_tokens": 32},
            "trainer": {"steps": 20},
        },
        {
            **CHAR,
            "batch": {"prompts": 16, "group_size": 8},
            "sampling": {"max_new_tokens": 64},
            "trainer": {"steps": 12},
        },
    ),
    "demo": (
        {**SMOLLM2, "batch": {"prompts": 8, "group_size": 8}, "trainer": {"steps": 6}},
        {**SMOLLM2, "batch": {"prompts": 6, "group_size": 16}, "trainer": {"steps": 5}},
    ),
    "ray": (
        {
            **RAY,
            "batch": {"prompts": 8, "group_size": 8},
            "sampling": {"max_new_tokens": 24},
            "pool": {**POOL, "mean_time_to_eviction_s": 25.0, "seed": 6},
            "trainer": {"steps": 60},
        },
        {
            **RAY,
            "batch": {"prompts": 12, "group_size": 8},
            "sampling": {"max_new_tokens": 36},
            "pool": {**POOL, "mean_time_to_eviction_s": 18.0, "seed": 11},
            "trainer": {"steps": 40},
        },
    ),
}
"""The run to calibrate on, and the run to predict."""


@dataclass
class Case:
    """One pair, over all rounds. Seconds."""

    name: str
    actual: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    forecast: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    evictions: list[float] = field(default_factory=list)
    processor_shares: list[float] = field(default_factory=list)

    def error(self, measure: str) -> float:
        """Error of the first round's forecast relative to the mean of the actual runs."""
        actual = fmean(self.actual[measure])
        return self.forecast[measure][0] / actual - 1

    def allowed(self, measure: str) -> float:
        actual = self.actual[measure]
        spread = DEVIATIONS * stdev(actual) / fmean(actual) if len(actual) > 1 else 0.0
        return max(AIM, spread)

    def reached(self, measure: str) -> bool:
        return abs(self.error(measure)) <= self.allowed(measure)


def spec_of(sections: Sections) -> RunSpec:
    return RunSpec.model_validate({**sections, "trainer": {**sections["trainer"], "threads": 1}})


def trained(spec: RunSpec, directory: Path) -> RunDirectory:
    """A real run in a separate process.

    Raises:
        RuntimeError: it failed.
    """
    recipe = directory.with_suffix(".toml")
    recipe.write_text(tables_to_toml(spec.model_dump(mode="json", exclude_unset=True)))
    train(recipe, directory, environment=ONE_THREAD | OFFLINE, progress=False, deadline_s=DEADLINE_S)
    return RunDirectory(directory)


def one_round(case: Case, pair: tuple[Sections, Sections], folder: Path) -> None:
    known, target = map(spec_of, pair)
    began_s = time.monotonic()
    profile = calibrate(trained(known, folder / "known").path)
    forecast = forecast_recipe(target, profile)
    case.processor_shares.append(profile.processor_share)
    case.forecast["step_s"].append(forecast.usual_step_s.mean)
    case.forecast["total_s"].append(forecast.total_s.mean)
    run = trained(target, folder / "target")
    lines = [line for line in read_metrics(run.metrics) if line.step > 1]
    summary = run.read_summary()
    check_evictions(case.name, target, summary)
    case.actual["step_s"].append(fmean(line.values[STEP_TIME] for line in lines))
    case.actual["total_s"].append(float(summary["wall_s"]))
    case.evictions.append(float(summary["evictions"]))
    said = ", ".join(f"{name} {case.forecast[name][-1]:.3g} → {case.actual[name][-1]:.3g}" for name in MEASURES)
    print(f"{case.name}: forecast → actual {said}; {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)


def check_evictions(name: str, spec: RunSpec, summary: Mapping[str, Any]) -> None:
    """Raises RuntimeError: no machine of a synthetic pool was evicted."""
    if spec.pool.kind == "synthetic":
        check_counts(name, evictions=summary["evictions"])


def show(cases: Sequence[Case]) -> None:
    table = Table(title="forecast against actual runs", box=box.SIMPLE)
    for column in ("run", "of", "forecast", "actual", "±", "off by", "other rounds", "allowed"):
        table.add_column(column, justify="left" if column in ("run", "of") else "right")
    for case in cases:
        for name in MEASURES:
            actual = case.actual[name]
            others = [found / fmean(actual) - 1 for found in case.forecast[name][1:]]
            table.add_row(
                case.name,
                name,
                f"{case.forecast[name][0]:.3g}",
                f"{fmean(actual):.3g}",
                f"{stdev(actual):.2g}" if len(actual) > 1 else "-",
                f"{case.error(name):+.1%}",
                ", ".join(f"{each:+.1%}" for each in others) or "-",
                f"{case.allowed(name):.1%} {'reached' if case.reached(name) else 'MISSED'}",
            )
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parsed(parser)
    cases = [Case(name) for name in options.only]
    with tempfile.TemporaryDirectory(prefix="tidemill-benchmark-") as temporary:
        for number in range(options.rounds):
            for case in cases:
                folder = (options.keep or Path(temporary)) / f"{case.name}-{number}"
                folder.mkdir(parents=True)
                one_round(case, PAIRS[case.name], folder)
    show(cases)
    complete = set(options.only) == set(PAIRS) and options.rounds > 1
    content = {
        "aim": AIM,
        "rounds": options.rounds,
        "cases": [
            {
                **asdict(case),
                "error": {name: case.error(name) for name in MEASURES},
                "allowed": {name: case.allowed(name) for name in MEASURES},
                "reached": {name: case.reached(name) for name in MEASURES},
            }
            for case in cases
        ],
    }
    if complete:
        write_result("simulator_ourselves", content)
    return exit_code(content)


if __name__ == "__main__":
    sys.exit(main())
