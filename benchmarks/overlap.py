"""The trainer's idle share on Ray by policy lag: synchronous and overlapped.

    python -m benchmarks.overlap [--rounds N] [--steps N]

One trainer and one worker, each a process with one thread; the trainer's engine never generates, so only the two
processes overlap. Batches, model and seed are equal; runs alternate by lag, in another order each round. The first
steps of a run, in which the worker starts and generation gets ahead, and the last ones, without anything left to
generate, are not counted.

The published reference: if rollout takes 60 % of a step and training 40 %, the trainer is busy 40 % of the time in
sequence and 40 / 60 = 66.7 % overlapped. Both are also computed from the synchronous runs' times: with T for training
on a batch and R for generating one, T / (R + T) in sequence and T / max(R, T) overlapped. (A synchronous step already
has some overlap: gradients start while the last samples are generated.)

Idle shares are of wall time. If other processes use the same cores, both processes slow down: the trainer idles less,
but a step need not get shorter. The load average is reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from benchmarks.ray_runs import spec_of, steps_of, total
from benchmarks.subjects import check_counts, check_equal
from tidemill.telemetry.metrics import STEP_TIME, TRAINER_IDLE, MetricLine

LAGS = (0, 1, 3)
ROUNDS, COUNTED_STEPS = 3, 6
BEGINNING, END = 3, 3  # not counted
SLOTS = 24  # few, so that generation takes longer than training, about twice as long


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """One run, over its counted steps."""

    lag: int
    round: int
    samples: int  # learned from
    trained_tokens: int
    seconds: float
    step_s: float  # mean
    rollout_s: float  # mean; of a synchronous step: generating a batch
    train_s: float  # mean
    idle_share: float  # the trainer had no samples
    busy_share: float  # it computed gradients
    tokens_per_s: float  # trained
    lag_mean: float  # of trained tokens
    load_average: float  # of the machine at the end, over a minute


def main() -> int:
    parser = argparse.ArgumentParser(description="The trainer's idle share by policy lag, on Ray.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs at each lag")
    parser.add_argument("--steps", type=int, default=COUNTED_STEPS, help="of each run that are counted")
    options = parsed(parser)
    runs = []
    for number in range(options.rounds):
        first = number % len(LAGS)
        for lag in (*LAGS[first:], *LAGS[:first]):
            runs.append(_measured(lag, number, options.steps))
            print(f"  round {number + 1}, lag {lag}: {_words(runs[-1])}", file=sys.stderr, flush=True)
    check_runs(runs)
    return exit_code(_report(runs, quick=options.rounds < ROUNDS or options.steps < COUNTED_STEPS))


def _measured(lag: int, number: int, steps: int) -> Overlap:
    lines = steps_of(spec_of(BEGINNING + steps + END, slots=SLOTS, schedule={"max_policy_lag": lag}))
    return overlap_of(lines[BEGINNING : BEGINNING + steps], lag, number)


def overlap_of(lines: Sequence[MetricLine], lag: int, number: int) -> Overlap:
    """The figures of a run's counted steps."""
    seconds, train_s, tokens = (total(lines, name) for name in (STEP_TIME, "time_train_s", "tokens_trained"))
    return Overlap(
        lag=lag,
        round=number,
        samples=int(total(lines, "samples")),
        trained_tokens=int(tokens),
        seconds=seconds,
        step_s=seconds / len(lines),
        rollout_s=total(lines, "time_rollout_s") / len(lines),
        train_s=train_s / len(lines),
        idle_share=total(lines, TRAINER_IDLE) / seconds,
        busy_share=train_s / seconds,
        tokens_per_s=tokens / seconds,
        lag_mean=total(lines, "policy_lag_mean") / len(lines),
        load_average=os.getloadavg()[0],
    )


def check_runs(runs: Sequence[Overlap]) -> None:
    """All runs must train on as many samples, and generate during earlier steps exactly if the lag is above 0.

    Raises:
        RuntimeError: otherwise.
    """
    names = {f"round {one.round}, lag {one.lag}": one for one in runs}
    check_equal("numbers of samples", {name: one.samples for name, one in names.items()})
    for name, one in names.items():
        if one.lag:
            check_counts(name, tokens_of_an_earlier_version=one.lag_mean)
        elif one.lag_mean:
            raise RuntimeError(f"{name}: trained on tokens of an earlier version")


def expected(rollout_s: float, train_s: float) -> tuple[float, float]:
    """The trainer's busy share: in sequence, and with the shorter part hidden."""
    return train_s / (rollout_s + train_s), train_s / max(rollout_s, train_s)


def _words(one: Overlap) -> str:
    return f"idle {one.idle_share:.1%}, busy {one.busy_share:.1%}, {one.step_s:.2f} s per step"


def _report(runs: Sequence[Overlap], *, quick: bool) -> dict[str, Any]:
    by_lag = {lag: [one for one in runs if one.lag == lag] for lag in LAGS}
    _print_table(by_lag)
    rollout_s, train_s = (
        statistics.median(getattr(one, name) for one in by_lag[0]) for name in ("rollout_s", "train_s")
    )
    in_sequence, overlapped = expected(rollout_s, train_s)
    print(
        f"Synchronous, generating takes {rollout_s:.2f} s and learning {train_s:.2f} s a batch: the trainer would be "
        f"busy {in_sequence:.1%} of the time in sequence and at best {overlapped:.1%} overlapped (the reference's 60 % "
        "and 40 %: 40 % and 66.7 %)."
    )
    ratios = {lag: _ratios(by_lag[0], by_lag[lag]) for lag in LAGS if lag}
    for lag, (idle, step) in ratios.items():
        busy = statistics.median(one.busy_share for one in by_lag[lag])
        print(
            f"Lag {lag}: the trainer is idle for {idle:.2f} times the synchronous share and busy {busy:.1%} of the "
            f"time; a step takes {step:.2f} times as long."
        )
    load, cores = statistics.median(one.load_average for one in runs), os.cpu_count() or 1
    if load > cores:
        print(f"The machine was busy (load {load:.0f} on {cores} cores): trainer and worker shared the rest.")
    figures = {
        "rounds": len(by_lag[0]),
        "runs": [vars(one) for one in runs],
        "idle_share": {lag: statistics.median(one.idle_share for one in ones) for lag, ones in by_lag.items()},
        "busy_share": {lag: statistics.median(one.busy_share for one in ones) for lag, ones in by_lag.items()},
        "idle_ratio": {lag: idle for lag, (idle, _) in ratios.items()},
        "step_ratio": {lag: step for lag, (_, step) in ratios.items()},
        "expected_busy_in_sequence": in_sequence,
        "expected_busy_overlapped": overlapped,
        "reached": all(idle < 1 for idle, _ in ratios.values()),
    }
    write_result("overlap-partial" if quick else "overlap", figures)
    return figures


def _print_table(by_lag: dict[int, list[Overlap]]) -> None:
    table = Table(title="the trainer on Ray, by policy lag: median (lowest-highest of the runs)", box=box.SIMPLE)
    for column in ("max_policy_lag", "trainer idle", "trainer busy", "s / step", "trained tokens / s", "mean lag"):
        table.add_column(column, justify="right")
    for lag, ones in by_lag.items():
        table.add_row(
            str(lag),
            _spread([one.idle_share for one in ones], ".1%"),
            _spread([one.busy_share for one in ones], ".1%"),
            _spread([one.step_s for one in ones], ".2f"),
            _spread([one.tokens_per_s for one in ones], ".0f"),
            f"{statistics.median(one.lag_mean for one in ones):.2f}",
        )
    Console(width=140).print(table)


def _ratios(synchronous: Sequence[Overlap], ahead: Sequence[Overlap]) -> tuple[float, float]:
    """Ratios of idle shares and of step times to the synchronous run: medians over the rounds."""
    pairs = list(zip(synchronous, ahead, strict=True))
    return (
        statistics.median(b.idle_share / a.idle_share for a, b in pairs),
        statistics.median(b.step_s / a.step_s for a, b in pairs),
    )


def _spread(figures: Sequence[float], form: str) -> str:
    return f"{statistics.median(figures):{form}} ({min(figures):{form}}-{max(figures):{form}})"


if __name__ == "__main__":
    sys.exit(main())
