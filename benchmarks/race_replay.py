"""Every step of the learning race taken again in plain torch, with the samples of each side.

    python -m benchmarks.race_replay [--tasks addition sorting chat] [--seeds 3] [--steps N]

The race compares accuracies, which differ from seed to seed by more than a small error would change them. This looks
for such an error itself. Each side's steps are those of torch's AdamW on GRPO's loss if the weights agree after every
step; its samples are independent draws from the model's distribution if what `benchmarks.race_plain` sums over their
tokens and over pairs of siblings is 0 but for chance. Two sides that both do so learn the same. Fails if one does not.

Writes results/race_replay.json; tasks that are not run keep their results.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.learning_race import DEADLINE_S, SIDES, TASK_SETTINGS
from benchmarks.measuring import write_part
from benchmarks.models import quiet
from benchmarks.origin import parsed
from benchmarks.race_common import RaceSettings
from benchmarks.race_figures import check_same_work
from benchmarks.turns import Turn, take_turns

MICROBATCHES = {"Tidemill": 2048, "TRL": 32}  # tokens; samples
SUMS = ("logprob", "top", "siblings")
"""Of `benchmarks.race_plain`."""
WEIGHTS_TOLERANCE = 0.01  # of the distance that training moved the weights
MOST_STANDARD_ERRORS = 4.0  # of 18 figures one is larger by chance in one of 900 runs


def main() -> int:
    parser = argparse.ArgumentParser(description="The steps of the learning race again, in plain torch.")
    parser.add_argument("--tasks", nargs="+", choices=list(TASK_SETTINGS), default=list(TASK_SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="instead of each task's own; for a trial")
    options = parsed(parser)
    quiet()
    figures: dict[str, Any] = {}
    for task in options.tasks:
        steps = options.steps or TASK_SETTINGS[task].steps
        seeds = [_replayed(task, seed, steps) for seed in range(options.seeds)]
        figures[task] = {side: figures_of([of[side] for of in seeds]) for side in SIDES}
        write_part(
            "race_replay-partial" if options.steps else "race_replay", task, figures[task], parts=list(TASK_SETTINGS)
        )
    _print(figures)
    wrong = [f"{task}, {side}" for task, sides in figures.items() for side, found in sides.items() if not agrees(found)]
    if wrong:
        print(f"missed: {'; '.join(wrong)}")
    return bool(wrong)


def _replayed(task: str, seed: int, steps: int) -> dict[str, Sequence[Turn]]:
    print(f"{task}, seed {seed}", file=sys.stderr, flush=True)
    race = RaceSettings(
        task=task,
        seed=seed,
        steps=steps,
        learning_rate=TASK_SETTINGS[task].learning_rate,
        evaluate_every=0,
        microbatch=0,
        replay=True,
    )
    race.found.start()  # made here, as it may take longer than a side may be silent
    sides: dict[str, Any] = {
        name: (side, {"race": replace(race, microbatch=MICROBATCHES[name])}) for name, side in SIDES.items()
    }
    results = take_turns(sides, rounds=steps, deadline_s=DEADLINE_S, warm_up=False)
    check_same_work(results)
    return {name: result.turns for name, result in results.items()}


def figures_of(seeds: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """Of one side: how far its steps are from plain torch's, and its samples from the model's distribution."""
    notes = [[turn.notes for turn in turns] for turns in seeds]
    together = [each for one in notes for each in one]
    return {
        "steps": len(together),
        "tokens": sum(each["completion_tokens"] for each in together),
        "weights_off": max(each["weights_off"] for each in together),
        **{f"{name}_errors": _standard_errors(together, name) for name in SUMS},
        "of_seeds": [{f"{name}_errors": _standard_errors(one, name) for name in SUMS} for one in notes],
    }


def agrees(figures: Mapping[str, Any]) -> bool:
    errors = (abs(figures[f"{name}_errors"]) for name in SUMS)
    return bool(figures["weights_off"] <= WEIGHTS_TOLERANCE) and max(errors) <= MOST_STANDARD_ERRORS


def _standard_errors(notes: Sequence[Mapping[str, float]], name: str) -> float:
    """By which the sum over all tokens differs from the expected 0."""
    return sum(each[name] for each in notes) / math.sqrt(sum(each[f"{name}_variance"] for each in notes))


def _print(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    table = Table(
        title="each side's steps and samples, against plain torch; samples in standard errors", box=box.SIMPLE
    )
    for column in ("task", "side", "steps", "tokens", "weights off by", "logprobs", "most probable", "siblings"):
        table.add_column(column, justify="left" if column in ("task", "side") else "right")
    for task, sides in figures.items():
        for side, found in sides.items():
            errors = (f"{found[f'{name}_errors']:+.1f}" for name in SUMS)
            off = f"{found['weights_off']:.1e}"
            table.add_row(task, side, f"{found['steps']:.0f}", f"{found['tokens']:,.0f}", off, *errors)
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
