"""Steps and time of each published algorithm from a fine-tuned character model to 0.9 on held-out two-digit sums.

    python -m benchmarks.algorithms [--only grpo,ppo] [--seeds 3] [--again]

Eight unmodified presets (see `tidemill algorithms`), from the same start (see `benchmarks.sft_start`), on the same
prompts. One learning rate for all: those of the papers are about 1e-6, for models ten thousand times larger, and none
was tuned. PPO's critic uses ten times the actor's learning rate.

Results with the same settings in results/algorithms.json are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
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
    measured,
    of_case,
    spread,
    told_seeds,
)
from benchmarks.line_charts import PICTURES, Line, Panel, write_chart
from benchmarks.measuring import machine, write_result
from benchmarks.models import quiet
from benchmarks.origin import parsed
from benchmarks.sft_start import LEARNING, START
from benchmarks.stopping import interruptible

NAME = "algorithms"
STEPS, EVALUATE_EVERY = 60, 2
LEARNING_RATE, CRITIC_LEARNING_RATE = 1e-4, 1e-3
ALGORITHMS = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "ppo": "PPO",
}
METRICS = ("reward_mean", "clip_fraction", "entropy", "samples")
SETTINGS: dict[str, Any] = {
    "start": START,
    "learning": LEARNING,
    "steps": STEPS,
    "evaluate_every": EVALUATE_EVERY,
    "learning_rate": LEARNING_RATE,
    "critic_learning_rate": CRITIC_LEARNING_RATE,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Steps and seconds to 0.9 held-out accuracy, by algorithm.")
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="algorithms, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure existing results again")
    options = parsed(parser)
    quiet()
    torch.set_num_threads(1)
    wanted = [(case, seed) for seed in range(options.seeds) for case in options.only.split(",")]
    runs = measured(NAME, SETTINGS, wanted, again=options.again, run=_run, write=_write)
    check_start(runs)
    check_distinct(runs)
    rows = summary(runs)
    _print(rows)
    _draw(runs)
    return 0 if all(row["reached"] for row in rows) else 1


def _run(start: Path, case: str, seed: int) -> AdditionRun:
    changes = {
        "algorithm": {"name": case},
        "eval": {"every_steps": EVALUATE_EVERY},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "critic": {"learning_rate": CRITIC_LEARNING_RATE},
    }
    return addition_run(start, case, seed=seed, steps=STEPS, changes=changes, metrics=METRICS)


def summary(runs: Sequence[AdditionRun]) -> list[dict[str, Any]]:
    """A row for each algorithm that was measured."""
    rows = []
    for case, name in ALGORITHMS.items():
        if here := of_case(runs, case):
            arrived = sum(run.steps_to_target is not None for run in here)
            row = {
                "algorithm": name,
                "seeds": len(here),
                "reached_by": arrived,
                "reached": arrived == len(here),
                "learning_rate": here[0].learning_rate,
                "steps_to_target": [run.steps_to_target for run in here],
                "seconds_to_target": [run.seconds_to_target for run in here],
                "cpu_s_per_step": fmean(run.cpu_s / run.steps for run in here),
                "samples_per_step": fmean(run.means["samples"] for run in here),
                "clip_fraction": fmean(run.means["clip_fraction"] for run in here),
                "before": fmean(run.accuracy[0] for run in here),
                "after": interval(run.accuracy[run.steps] for run in here)._asdict(),
            }
            rows.append(row)
    return rows


def _write(runs: Sequence[AdditionRun]) -> None:
    seeds, rows = {case: len(of_case(runs, case)) for case in ALGORITHMS}, summary(runs)
    figures = {
        "target": TARGET,
        "seeds": seeds,
        "reached": all(seeds.values()) and all(row["reached"] for row in rows),
        "summary": rows,
        "settings": SETTINGS,
        "runs": [msgspec.to_builtins(run, str_keys=True) for case in ALGORITHMS for run in of_case(runs, case)],
    }
    write_result(NAME, figures)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(
        title=f"held-out two-digit sums, mean over seeds (lowest-highest); {machine()['cpu']}", box=box.SIMPLE
    )
    columns = ("algorithm", "seeds", "reached by", "learning rate", "before", f"after {STEPS}")
    for column in (*columns, f"steps to {TARGET:g}", f"seconds to {TARGET:g}", "CPU s / step"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for row in rows:
        table.add_row(
            row["algorithm"],
            str(row["seeds"]),
            str(row["reached_by"]),
            f"{row['learning_rate']:g}",
            f"{row['before']:.3f}",
            f"{row['after']['value']:.3f}",
            spread(row["steps_to_target"], 1),
            spread(row["seconds_to_target"], 1),
            f"{row['cpu_s_per_step']:.2f}",
        )
    Console(width=150).print(table)


def _draw(runs: Sequence[AdditionRun]) -> None:
    """Accuracy by step, and by training time at each algorithm's median pace."""
    by_step, by_time, counts = list[Line](), list[Line](), list[int]()
    for colour, (case, name) in enumerate(ALGORITHMS.items()):
        if here := of_case(runs, case):
            points, pace_s = mean_accuracy(here), fmean(run.step_s for run in here)
            by_step.append(Line.through(points, label=name, colour=colour))
            at = {step * pace_s: point for step, point in points.items()}
            by_time.append(Line.through(at, label=name, colour=colour, band=False))
            counts.append(len(here))
    panels = [
        Panel(title="Held-out accuracy by step", x_title="step", lines=by_step, high=1.0, marks=(TARGET,)),
        Panel(title="The same by time", x_title="seconds of training", lines=by_time, high=1.0, marks=(TARGET,)),
    ]
    write_chart(PICTURES / f"{NAME}.svg", f"Two-digit addition from one SFT start ({told_seeds(counts)})", panels)


if __name__ == "__main__":
    sys.exit(interruptible(main, keeps=True))
