"""Held-out accuracy of the demo with and without preemptible workers at every evaluation."""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path

from benchmarks.subjects import check_counts
from benchmarks.training_run import train
from tidemill.config.load import RECIPES
from tidemill.core.records import Record
from tidemill.telemetry.events import read_events
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.run_data import evaluations
from tidemill.telemetry.run_dir import RunDirectory

RECIPE_FILES = {"quiet": "smollm2-addition.toml", "evicted": "spot-trace.toml"}


class Curve(Record):
    """One run's held-out greedy accuracy by step, and events of its workers."""

    recipe: str
    seed: int
    accuracy: dict[int, float]
    n: int
    evictions: int
    migrations: int
    training_s: float


class Point(Record):
    """One evaluation, over the seeds."""

    step: int
    means: dict[str, float]  # by kind of run
    spreads: dict[str, tuple[float, float]]  # lowest and highest
    difference: float  # of the means, evicted minus quiet
    noise: float | None  # twice the standard error of that difference; None with one seed


def curve(folder: Path, kind: str, seed: int) -> Curve:
    """Run the demo in a separate process."""
    recipe = RECIPES / RECIPE_FILES[kind]
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)  # a checkpoint is 1.6 GB
    arguments = ["--run.seed", str(seed), "--trainer.threads", "1", "--checkpoint.every_steps", "0"]
    summary = train(recipe, run_dir, *arguments)
    run = RunDirectory(run_dir)
    found = evaluations(read_events(run.events), read_metrics(run.metrics))
    return Curve(
        recipe=recipe.name,
        seed=seed,
        accuracy={one.step: one.greedy_accuracy for one in found if one.greedy_accuracy is not None},
        n=summary["eval"]["n"],
        evictions=summary["evictions"],
        migrations=summary["migrations"],
        training_s=summary["training_s"],
    )


def check_curve(kind: str, found: Curve) -> None:
    """Raises RuntimeError: no sample of a run with evictions moved, or machines of a run without were evicted."""
    if kind == "evicted":
        check_counts(f"{found.recipe}, seed {found.seed}", evictions=found.evictions, migrations=found.migrations)
    elif found.evictions:
        raise RuntimeError(f"{found.recipe}, seed {found.seed}: {found.evictions} evictions, expected none")


def points(curves: dict[str, list[Curve]]) -> list[Point]:
    """Both kinds side by side, at the steps that all runs evaluated."""
    steps = set.intersection(*(set(one.accuracy) for of_kind in curves.values() for one in of_kind))
    found = []
    for step in sorted(steps):
        values = {kind: [one.accuracy[step] for one in of_kind] for kind, of_kind in curves.items()}
        means = {kind: statistics.fmean(of_kind) for kind, of_kind in values.items()}
        point = Point(
            step=step,
            means=means,
            spreads={kind: (min(of_kind), max(of_kind)) for kind, of_kind in values.items()},
            difference=means["evicted"] - means["quiet"],
            noise=_noise(list(values.values())),
        )
        found.append(point)
    return found


def _noise(samples: list[list[float]]) -> float | None:
    if any(len(sample) < 2 for sample in samples):
        return None
    return 2.0 * math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in samples))
