"""The cost of training on old samples: policy lag 0 to 10, with the default correction and without.

    python -m benchmarks.staleness [--only 0,3] [--seeds 5] [--again]

GRPO from the start of `benchmarks.sft_start`, 100 steps. With `max_policy_lag` k generation runs k batches ahead; sums
are short, so nearly every token is k versions old when it is trained on. Engine and trainer share a thread here, so
running ahead saves no time: CPU seconds per step show the cost of a schedule, and `benchmarks.overlap`, with separate
workers, its gain.

Results with the same settings in results/staleness.json are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.addition_runs import (
    TARGET,
    AdditionRun,
    addition_run,
    check_distinct,
    check_start,
    interval,
    mean_accuracy,
    mean_binned,
    measured,
    of_case,
    spread,
    told_seeds,
)
from benchmarks.line_charts import PICTURES, Line, Panel, write_chart
from benchmarks.measuring import exit_code, write_result
from benchmarks.models import quiet
from benchmarks.origin import parsed
from benchmarks.sft_start import LEARNING, START
from benchmarks.stopping import interruptible

NAME = "staleness"
STEPS = 100
LEARNING_RATE = 1e-4
LAGS = (0, 1, 3, 5, 10)
CORRECTIONS: dict[str, dict[str, Any]] = {"none": {"correction": {"kind": "none"}}, "default": {}}
JUDGED_LAG, ALLOWED_RATIO = 3, 1.15
METRICS = (
    "reward_mean",
    "ratio_mean",
    "ratio_var",
    "ratio_max",
    "effective_sample_size",
    "mismatch_kl",
    "correction_truncated",
    "policy_lag_mean",
)
SETTINGS: dict[str, Any] = {
    "start": START,
    "learning": LEARNING,
    "algorithm": "grpo",
    "steps": STEPS,
    "learning_rate": LEARNING_RATE,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Reward, time, ratio variance and ESS by policy lag.")
    parser.add_argument("--only", default=",".join(map(str, LAGS)), help="lags, separated by commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="measure existing results again")
    options = parsed(parser)
    quiet()
    torch.set_num_threads(1)
    lags = [int(lag) for lag in options.only.split(",")]
    wanted = [(case_of(lag, name), seed) for seed in range(options.seeds) for lag in lags for name in CORRECTIONS]
    runs = measured(NAME, SETTINGS, wanted, again=options.again, run=_run, write=_write)
    check_start(runs)
    check_distinct(runs)
    check_lags(runs)
    _print(runs)
    _draw(runs)
    return exit_code(verdict(runs))


def case_of(lag: int, correction: str) -> str:
    return f"lag {lag}, {correction}"


def _lag_of(case: str) -> tuple[int, str]:
    lag, correction = case.removeprefix("lag ").split(", ")
    return int(lag), correction


def _run(start: Path, case: str, seed: int) -> AdditionRun:
    lag, correction = _lag_of(case)
    changes = {
        "algorithm": CORRECTIONS[correction],
        "schedule": {"max_policy_lag": lag},
        "optimizer": {"learning_rate": LEARNING_RATE},
    }
    return addition_run(start, case, seed=seed, steps=STEPS, changes=changes, metrics=METRICS)


def check_lags(runs: Sequence[AdditionRun]) -> None:
    """Raises RuntimeError: trained tokens were on average less than half as old as the lag, or older."""
    for run in runs:
        lag, mean = _lag_of(run.case)[0], run.means["policy_lag_mean"]
        if not lag / 2 <= mean <= lag:
            raise RuntimeError(f"{run.case}, seed {run.seed}: trained tokens were {mean:g} versions old")


def summary(runs: Sequence[AdditionRun]) -> list[dict[str, Any]]:
    """A row per lag and correction, with intervals over seeds."""
    rows = []
    for correction in CORRECTIONS:
        for lag in LAGS:
            if here := of_case(runs, case_of(lag, correction)):
                row = {
                    "max_policy_lag": lag,
                    "correction": correction,
                    "seeds": len(here),
                    "reward_per_step": interval(run.means["reward_mean"] for run in here)._asdict(),
                    "cpu_s_per_step": interval(run.cpu_s / run.steps for run in here)._asdict(),
                    "accuracy_after": interval(run.accuracy[run.steps] for run in here)._asdict(),
                    "reached_by": sum(run.steps_to_target is not None for run in here),
                    "steps_to_target": [run.steps_to_target for run in here],
                    **{name: interval(run.means[name] for run in here)._asdict() for name in METRICS[1:]},
                }
                rows.append(row)
    return rows


def steps_ratio(runs: Sequence[AdditionRun], baseline: Sequence[AdditionRun]) -> dict[str, float] | None:
    """Optimizer steps to the target relative to `baseline`, seed by seed, with the interval.

    None if no seed is in both, or one of them never reached it.
    """
    others = {run.seed: run for run in baseline}
    pairs = [(run.steps_to_target, others[run.seed].steps_to_target) for run in runs if run.seed in others]
    ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    return interval(ratios)._asdict() if ratios and len(ratios) == len(pairs) else None


def verdict(runs: Sequence[AdditionRun]) -> dict[str, Any]:
    """The aim: with the default correction, the tested lag needs at most ALLOWED_RATIO times the steps of lag 0."""
    baseline = of_case(runs, case_of(0, "default"))
    ratio = steps_ratio(of_case(runs, case_of(JUDGED_LAG, "default")), baseline)
    return {
        "lag": JUDGED_LAG,
        "steps_ratio": ratio,
        "allowed": ALLOWED_RATIO,
        "reached": None if ratio is None else ratio["value"] <= ALLOWED_RATIO,
    }


def _write(runs: Sequence[AdditionRun]) -> None:
    cases = [case_of(lag, name) for lag in LAGS for name in CORRECTIONS]
    figures = {
        "target": TARGET,
        "seeds": {case: len(of_case(runs, case)) for case in cases},
        "aim": verdict(runs),
        "summary": summary(runs),
        "settings": SETTINGS,
        "runs": [msgspec.to_builtins(run, str_keys=True) for case in cases for run in of_case(runs, case)],
    }
    write_result(NAME, figures)


def _print(runs: Sequence[AdditionRun]) -> None:
    table = Table(title=f"GRPO, {STEPS} steps: mean over seeds ± half of the 95 % interval", box=box.SIMPLE)
    columns = ("correction", "lag", "seeds", "reward / step", "accuracy after", f"steps to {TARGET:g}")
    for column in (*columns, "CPU s / step", "ratio variance", "ESS", "true lag"):
        table.add_column(column, justify="left" if column == "correction" else "right")
    for row in summary(runs):
        table.add_row(
            row["correction"],
            str(row["max_policy_lag"]),
            str(row["seeds"]),
            _half(row["reward_per_step"]),
            _half(row["accuracy_after"]),
            spread(row["steps_to_target"], 1),
            _half(row["cpu_s_per_step"]),
            _half(row["ratio_var"]),
            _half(row["effective_sample_size"]),
            f"{row['policy_lag_mean']['value']:.2f}",
        )
    Console(width=170).print(table)
    found = verdict(runs)
    if ratio := found["steps_ratio"]:
        words = f"{ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f}) times the optimizer steps of lag 0"
        print(f"lag {JUDGED_LAG}, default correction: {words} to {TARGET:g}; aim: at most {ALLOWED_RATIO:g}")


def _half(found: dict[str, float]) -> str:
    return f"{found['value']:.3f} ± {found['high'] - found['value']:.3f}"


def _draw(runs: Sequence[AdditionRun]) -> None:
    """Learning curves of both corrections, and every figure by lag."""
    curves, accuracies, counts = [], [], list[int]()
    for correction, words in (("default", "default correction"), ("none", "no correction")):
        here = [(at, lag, of_case(runs, case_of(lag, correction))) for at, lag in enumerate(LAGS)]
        measured_here = [(at, lag, of_lag) for at, lag, of_lag in here if of_lag]
        counts += [len(of_lag) for _, _, of_lag in measured_here]
        curves.append(
            Panel(
                title=f"Reward per step, {words}",
                x_title="step",
                lines=[
                    Line.through(mean_binned(of_lag, "reward_mean"), label=f"lag {lag}", colour=at)
                    for at, lag, of_lag in measured_here
                ],
                low=0.4,
                high=1.0,
            )
        )
        accuracies.append(
            Panel(
                title=f"Held-out accuracy, {words}",
                x_title="step",
                lines=[
                    Line.through(mean_accuracy(of_lag), label=f"lag {lag}", colour=at)
                    for at, lag, of_lag in measured_here
                ],
                low=0.3,
                high=1.0,
                marks=(TARGET,),
            )
        )
    by_lag = [
        _by_lag(runs, "Reward per step, mean of the run", lambda run: run.means["reward_mean"]),
        _by_lag(runs, "Seconds of CPU per step", lambda run: run.cpu_s / run.steps, low=0.0),
        _by_lag(runs, "Variance of the importance ratio", lambda run: run.means["ratio_var"], low=0.0),
        _by_lag(runs, "Effective sample size", lambda run: run.means["effective_sample_size"], high=1.0),
    ]
    title = f"What policy lag costs: GRPO, two-digit addition ({told_seeds(counts)})"
    write_chart(PICTURES / f"{NAME}.svg", title, [*curves, *accuracies, *by_lag])


def _by_lag(
    runs: Sequence[AdditionRun],
    title: str,
    figure: Callable[[AdditionRun], float],
    low: float | None = None,
    high: float | None = None,
) -> Panel:
    lines = []
    for at, (correction, words) in enumerate((("default", "default correction"), ("none", "no correction"))):
        points = {
            float(lag): interval(figure(run) for run in here)
            for lag in LAGS
            if (here := of_case(runs, case_of(lag, correction)))
        }
        lines.append(Line.through(points, label=words, colour=5 + at, dashed=correction == "none"))
    return Panel(title=title, x_title="max_policy_lag", lines=[line for line in lines if line.xs], low=low, high=high)


if __name__ == "__main__":
    sys.exit(interruptible(main, keeps=True))
