"""Held-out greedy accuracy of the demo before and after training over seeds, and a control with random rewards.

    python -m benchmarks.demo_accuracy [--seeds 3] [--threads N]

Each run is `tidemill train` in a separate process. The benchmark fails if the control learns anything.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import BYTES_PER_GB, write_result
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.training_run import train
from tidemill.config.load import RECIPES
from tidemill.telemetry.statistics import wilson_interval

RECIPE = RECIPES / "smollm2-addition.toml"
CONTROL = '[scoring]\nrewards = [{ kind = "random" }]\n'
TARGET_ACCURACY = 0.80
TARGET_TRAINING_S = 360.0
TARGET_PEAK_BYTES = 3.5e9


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run. Accuracies are shares of `n` held-out prompts."""

    seed: int
    before: float
    after: float
    n: int
    training_s: float
    wall_s: float
    peak_rss_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Held-out accuracy of the demo over seeds, and its control.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="trainer.threads; 0 lets the run measure")
    options = parsed(parser)
    quiet()
    smollm2()  # converted before the first run, so that all runs do the same
    with tempfile.TemporaryDirectory(prefix="tidemill-demo-") as folder:
        control = Path(folder) / "control.toml"
        control.write_text(CONTROL)
        kinds = {"correct answers": [], "random rewards": [f"@{control}"]}
        outcomes = {
            kind: [_run(Path(folder), seed, options.threads, recipes) for seed in range(options.seeds)]
            for kind, recipes in kinds.items()
        }
    _print(outcomes)
    check_control(outcomes["random rewards"])
    demo = outcomes["correct answers"]
    accuracy = statistics.mean(outcome.after for outcome in demo)
    reached = {
        "accuracy": accuracy >= TARGET_ACCURACY,
        "training_s": max(outcome.training_s for outcome in demo) <= TARGET_TRAINING_S,
        "peak_rss": max(outcome.peak_rss_bytes for outcome in demo) <= TARGET_PEAK_BYTES,
    }
    runs = {kind: [vars(outcome) for outcome in results] for kind, results in outcomes.items()}
    partial = "-partial" if options.seeds != 3 or options.threads else ""
    write_result(f"demo_accuracy{partial}", {"recipe": RECIPE.name, "runs": runs, "reached": reached})
    return 0 if all(reached.values()) else 1


def _run(folder: Path, seed: int, threads: int, recipes: list[str]) -> Outcome:
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)  # a checkpoint is 1.6 GB
    arguments = [*recipes, "--run.seed", str(seed), "--trainer.threads", str(threads), "--checkpoint.every_steps", "0"]
    summary = train(RECIPE, run_dir, *arguments)
    return Outcome(
        seed=seed,
        before=summary["eval"]["before"]["greedy_accuracy"],
        after=summary["eval"]["after"]["greedy_accuracy"],
        n=summary["eval"]["n"],
        training_s=summary["training_s"],
        wall_s=summary["wall_s"],
        peak_rss_bytes=summary["peak_rss_bytes"],
    )


def check_control(control: Sequence[Outcome]) -> None:
    """Raises RuntimeError: the accuracy of a control rises beyond the 95 % intervals over its prompts."""
    for one in control:
        if wilson_interval(one.after, one.n)[0] > wilson_interval(one.before, one.n)[1]:
            raise RuntimeError(f"seed {one.seed}: random rewards raise the accuracy from {one.before} to {one.after}")


def _print(outcomes: dict[str, list[Outcome]]) -> None:
    table = Table(title="demo: held-out greedy accuracy, mean over seeds (lowest-highest)", box=box.SIMPLE)
    for column in ("rewards", "seeds", "n", "before", "after", "training s", "peak RSS GB"):
        table.add_column(column, justify="left" if column == "rewards" else "right")
    for kind, results in outcomes.items():
        table.add_row(
            kind,
            str(len(results)),
            str(results[0].n),
            _spread([result.before for result in results], 2),
            _spread([result.after for result in results], 2),
            _spread([result.training_s for result in results], 0),
            f"{max(result.peak_rss_bytes for result in results) / BYTES_PER_GB:.2f}",
        )
    Console(width=140).print(table)


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
