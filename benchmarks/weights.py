"""Weights by pull: bytes per publish for a worker, and the pause of its generation.

    python -m benchmarks.weights [--steps N] [--rounds N] [--only deltas|pause]

SmolLM2 in both. Deltas: trained on additions with the demo's recipe at learning rate 1e-6, published in bf16 after
every step. Pause: 16 samples being decoded while a version is pulled, on two threads of this process. The benchmark
fails if a step changes no weights, if they are not pulled as deltas, or if nothing is decoded during a pull.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import exit_code, write_result
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.weights_delta import Publish, publishes_of_a_run
from benchmarks.weights_pause import CASES, Pause, check_pause, pause

LEARNING_RATE = 1e-6
STEPS, ROUNDS = 30, 5
FIRST_STEP = 10
"""First step of the median: earlier steps are Adam's warm-up."""
TARGET_RATIO = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description="What publishing weights costs.")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps whose deltas are measured")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="pulls of each case")
    parser.add_argument("--only", choices=("deltas", "pause"), help="one half of it")
    options = parsed(parser)
    quiet()
    model = smollm2()
    content: dict[str, Any] = {}
    if options.only != "pause":
        content["deltas"] = _deltas(model, options.steps)
    if options.only != "deltas":
        pauses = [pause(case, model, rounds=options.rounds) for case in CASES]
        for case, one in zip(CASES, pauses, strict=True):
            check_pause(case, one)
        _print_pauses(pauses)
        content["pause"] = [vars(one) for one in pauses]
    whole = (options.steps, options.rounds, options.only) == (STEPS, ROUNDS, None)
    write_result("weights" if whole else "weights-partial", content)
    return exit_code(content)


def _deltas(model: Path, steps: int) -> dict[str, Any]:
    publishes = publishes_of_a_run(model, learning_rate=LEARNING_RATE, steps=steps)
    check_deltas(publishes)
    late = [one for one in publishes if one.step >= min(FIRST_STEP, steps)]
    ratios = [one.full_nbytes / one.pulled_nbytes for one in late]
    figures = {
        "learning_rate": LEARNING_RATE,
        "steps": [late[0].step, late[-1].step],
        "changed_median": statistics.median(one.changed for one in late),
        "times_fewer_bytes_median": statistics.median(ratios),
        "times_fewer_bytes_lowest": min(one.full_nbytes / one.pulled_nbytes for one in publishes),
        "encode_s_median": statistics.median(one.encode_s for one in late),
        "apply_s_median": statistics.median(one.apply_s for one in late),
        "identical": all(one.identical for one in publishes),
        "target": TARGET_RATIO,
        "reached": statistics.median(ratios) >= TARGET_RATIO,
        "publishes": [vars(one) for one in publishes],
    }
    _print_deltas(publishes, figures)
    return figures


def check_deltas(publishes: Sequence[Publish]) -> None:
    """Raises RuntimeError: a worker pulled a whole snapshot."""
    if whole := [one.step for one in publishes if one.pulled_nbytes >= one.full_nbytes]:
        raise RuntimeError(f"no delta was pulled after the steps {whole}")


def _print_deltas(publishes: list[Publish], figures: dict[str, Any]) -> None:
    first, last = figures["steps"]
    table = Table(title="bytes pulled after a step, bf16", box=box.SIMPLE)
    for column in ("step", "changed", "pulled MB", "of full", "encode s", "apply s", "identical"):
        table.add_column(column, justify="right")
    for one in publishes:
        share = f"1/{one.full_nbytes / one.pulled_nbytes:.0f}"
        times = (f"{one.encode_s:.2f}", f"{one.apply_s:.2f}")
        cells = (f"{one.changed:.2%}", f"{one.pulled_nbytes / 1e6:.2f}", share, *times, str(one.identical))
        table.add_row(str(one.step), *cells)
    Console(width=140).print(table)
    verdict = f"target 1/{TARGET_RATIO:g} {'reached' if figures['reached'] else 'MISSED'}"
    print(
        f"median of steps {first} to {last}: 1/{figures['times_fewer_bytes_median']:.0f} of the full bytes, {verdict}"
    )


def _print_pauses(pauses: list[Pause]) -> None:
    table = Table(title="generation during a pull, 16 samples of SmolLM2, milliseconds", box=box.SIMPLE)
    names = ("longest gap, quiet", "while pulling", "at the swap", "of that the swap")
    for column in ("case", "a step", *names, "pull", "pulled MB"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for one in pauses:
        gaps_s = (one.longest_gap_quiet_s, one.longest_gap_pulling_s, one.longest_gap_swap_s)
        seconds = (one.step_s, *gaps_s, one.swap_s, one.pull_s)
        table.add_row(one.case, *(f"{1000 * value:.1f}" for value in seconds), f"{one.pulled_nbytes / 1e6:.2f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
