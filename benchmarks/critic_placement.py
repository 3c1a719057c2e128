"""Time of a PPO step on Ray with the critic in the trainer's process and in a separate process.

    python -m benchmarks.critic_placement [--rounds N] [--steps N]

Trainer, critic and worker have one thread each; policy and critic are equally large. Runs alternate by placement, in
another order each round. In the trainer's process, values, critic gradients and policy gradients are computed one after
another; in a separate process values are computed while other groups are generated, and both models train concurrently:
at best, training takes the time of the slower one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from benchmarks.ray_runs import spec_of, steps_of, total
from benchmarks.subjects import check_equal
from tidemill.telemetry.metrics import CRITIC_WAIT, STEP_TIME, MetricLine

PLACEMENTS = ("trainer", "actor")
ROUNDS, COUNTED_STEPS = 3, 4
BEGINNING = 2  # steps that are not counted
SLOTS = 32


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One run, means over its counted steps."""

    placement: str
    round: int
    samples: int  # trained, in total
    step_s: float
    train_s: float
    critic_wait_s: float  # waiting for the separate critic
    explained_variance: float  # in the last step
    load_average: float  # of the machine at the end, over a minute


def main() -> int:
    parser = argparse.ArgumentParser(
        description="PPO on Ray with the critic in the trainer's process and in a separate one."
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs per placement")
    parser.add_argument("--steps", type=int, default=COUNTED_STEPS, help="counted steps per run")
    options = parsed(parser)
    runs = []
    for number in range(options.rounds):
        for placement in PLACEMENTS if number % 2 == 0 else reversed(PLACEMENTS):
            runs.append(_measured(placement, number, options.steps))
            words = f"{runs[-1].train_s:.2f} s learning, {runs[-1].step_s:.2f} s a step"
            print(f"  round {number + 1}, {placement}: {words}", file=sys.stderr, flush=True)
    check_equal("numbers of samples", {f"round {one.round}, {one.placement}": one.samples for one in runs})
    _report(runs, quick=options.rounds < ROUNDS or options.steps < COUNTED_STEPS)
    return 0


def _measured(placement: str, number: int, steps: int) -> Placed:
    spec = spec_of(
        BEGINNING + steps,
        slots=SLOTS,
        placement={"critic": placement},
        algorithm={"name": "ppo", "kl_beta": 0.0},
        critic={"learning_rate": 1e-4},
    )
    return placed_of(steps_of(spec)[BEGINNING:], placement, number)


def placed_of(lines: Sequence[MetricLine], placement: str, number: int) -> Placed:
    """The figures of a run's counted steps.

    Raises:
        RuntimeError: the critic was not where `placement` says.
    """
    if any((CRITIC_WAIT in line.values) != (placement == "actor") for line in lines):
        raise RuntimeError(f"the critic's placement is not {placement}")
    return Placed(
        placement=placement,
        round=number,
        samples=int(total(lines, "samples")),
        step_s=total(lines, STEP_TIME) / len(lines),
        train_s=total(lines, "time_train_s") / len(lines),
        critic_wait_s=total(lines, CRITIC_WAIT) / len(lines) if placement == "actor" else 0.0,
        explained_variance=lines[-1].values["explained_variance"],
        load_average=os.getloadavg()[0],
    )


def _report(runs: Sequence[Placed], *, quick: bool) -> None:
    here, beside = ([one for one in runs if one.placement == placement] for placement in PLACEMENTS)
    table = Table(title="PPO on Ray: median (lowest-highest of the runs), seconds per step", box=box.SIMPLE)
    for column in ("critic", "learning", "of that, waiting for the critic", "step"):
        table.add_column(column, justify="left" if column == "critic" else "right")
    for name, ones in (("in the trainer's process", here), ("beside it", beside)):
        columns = ([getattr(one, field) for one in ones] for field in ("train_s", "critic_wait_s", "step_s"))
        table.add_row(name, *map(_spread, columns))
    Console(width=140).print(table)
    learning, step = (_ratio(here, beside, field) for field in ("train_s", "step_s"))
    print(
        f"With a separate critic, training takes {learning:.2f} times as long, a step {step:.2f} times (at best 0.5)."
    )
    figures = {"rounds": len(here), "runs": [vars(one) for one in runs], "train_ratio": learning, "step_ratio": step}
    write_result("critic_placement-partial" if quick else "critic_placement", figures)


def _ratio(here: Sequence[Placed], beside: Sequence[Placed], field: str) -> float:
    """Median over the rounds."""
    pairs = zip(here, beside, strict=True)
    ratios: list[float] = [getattr(after, field) / getattr(before, field) for before, after in pairs]
    return statistics.median(ratios)


def _spread(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.2f} ({min(figures):.2f}-{max(figures):.2f})"


if __name__ == "__main__":
    sys.exit(main())
