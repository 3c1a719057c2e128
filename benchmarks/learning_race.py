"""Learning per step and per CPU second against TRL's `GRPOTrainer`, on three tasks over seeds.

    python -m benchmarks.learning_race [--tasks addition sorting chat] [--seeds 10] [--steps N] [--defaults] [--draw]

Both sides start with the same weights and answer the same prompts in the same order, with the same reward, loss and
optimizer, in float32 and one thread, each with the microbatch that is fastest for it here. They alternate step by step
on one core; evaluations (greedy decoding of held-out questions, on a stock model) do not count. With `--defaults`
everything but task, batch and learning rate is as each library has it. Fails unless both do the same work: prompts,
lengths, reward and gradient of the first step (against plain torch).

Writes results/learning_race_TASK.json, and docs/learning_race.svg from these files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.addition_runs import interval
from benchmarks.line_charts import PICTURES, Line, Panel, write_chart
from benchmarks.measuring import RESULTS, write_result
from benchmarks.models import quiet
from benchmarks.origin import parsed
from benchmarks.race_common import Evaluator, RaceSettings
from benchmarks.race_figures import Run, accuracy_at, check_same_work, cpu_seconds_to, run_of
from benchmarks.race_tasks import TASKS, RaceTask
from benchmarks.race_tidemill import tidemill_side
from benchmarks.race_trl import trl_side
from benchmarks.turns import Side, take_turns
from tidemill.core.records import Record
from tidemill.telemetry.statistics import Interval

DEADLINE_S = 900.0
SIDES: dict[str, Side] = {"Tidemill": tidemill_side, "TRL": trl_side}
MICROBATCHES = {"Tidemill": (1024, 2048, 4096), "TRL": (8, 16, 32, 64)}  # tokens; samples
TARGET = 1.5  # times fewer CPU seconds to an accuracy


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The learning rate was chosen on our side; CPU seconds are counted to each of the accuracies."""

    steps: int
    evaluate_every: int
    learning_rate: float
    accuracies: tuple[float, ...]


TASK_SETTINGS = {
    "addition": TaskSettings(steps=32, evaluate_every=2, learning_rate=2e-5, accuracies=(0.5, 0.8, 0.9)),
    "sorting": TaskSettings(steps=100, evaluate_every=5, learning_rate=2.5e-5, accuracies=(0.2, 0.4, 0.5)),
    "chat": TaskSettings(steps=20, evaluate_every=2, learning_rate=2e-5, accuracies=(0.7, 0.8, 0.9)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Held-out accuracy by step and by CPU second, against TRL.")
    parser.add_argument("--tasks", nargs="+", choices=list(TASK_SETTINGS), default=list(TASK_SETTINGS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="instead of each task's own; for a trial")
    parser.add_argument("--defaults", action="store_true", help="each library's own settings")
    parser.add_argument("--draw", action="store_true", help="only draw the picture from the result files")
    options = parsed(parser)
    quiet()
    missed = list[str]()
    if not options.draw:
        for task in (task for task in TASKS if task.name in options.tasks):
            figures = _raced(task, options)
            if options.defaults:
                del figures["reached"]  # the aims are of equal settings
            missed += [f"{task.name}: {aim}" for aim, reached in figures.get("reached", {}).items() if not reached]
            _print(task.name, figures)
            kind = "_defaults" if options.defaults else ""
            partial = "-partial" if options.steps else ""
            write_result(f"learning_race_{task.name}{kind}{partial}", figures)
    _draw()
    if missed:
        print(f"missed: {', '.join(missed)}")
    return bool(missed)


def _raced(task: RaceTask, options: argparse.Namespace) -> dict[str, Any]:
    chosen = TASK_SETTINGS[task.name]
    if options.steps:
        chosen = replace(chosen, steps=options.steps)
    start = Evaluator(task).accuracy(None)
    settings = RaceSettings(
        task=task.name,
        seed=0,
        steps=chosen.steps,
        learning_rate=chosen.learning_rate,
        evaluate_every=chosen.evaluate_every,
        microbatch=0,
        defaults=options.defaults,
    )
    best = {side: 0 if options.defaults else _best_microbatch(side, settings) for side in SIDES}
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for seed in range(options.seeds):
        print(f"{task.name}, seed {seed}", file=sys.stderr, flush=True)
        sides = {
            name: (side, {"race": replace(settings, seed=seed, microbatch=best[name])}) for name, side in SIDES.items()
        }
        results = take_turns(sides, rounds=chosen.steps, deadline_s=DEADLINE_S, warm_up=False)
        check_same_work(results, same_loss=not options.defaults)
        for name, result in results.items():
            runs[name].append(run_of(seed, result.turns, start))
    return {
        "settings": vars(chosen),
        "start": start,
        "microbatch": best,
        "runs": msgspec.to_builtins(runs),
        **figures_of(runs, chosen.accuracies),
    }


def _best_microbatch(side: str, settings: RaceSettings) -> int:
    """The fastest in the third step."""
    spent = {}
    for microbatch in MICROBATCHES[side]:
        race = replace(settings, microbatch=microbatch, evaluate_every=0, steps=3)
        turns = take_turns({side: (SIDES[side], {"race": race})}, rounds=3, deadline_s=DEADLINE_S, warm_up=False)
        spent[microbatch] = turns[side].turns[-1].cpu_s
    return min(spent, key=lambda microbatch: spent[microbatch])


class ToAccuracy(Record):
    """CPU seconds to an accuracy, by seed; None where it was not reached."""

    accuracy: float
    ours_cpu_s: list[float | None]
    theirs_cpu_s: list[float | None]

    def ratios(self) -> list[float]:
        """Theirs to ours, of the seeds in which both reached it."""
        pairs = zip(self.ours_cpu_s, self.theirs_cpu_s, strict=True)
        return [theirs / ours for ours, theirs in pairs if ours and theirs is not None]


def figures_of(runs: dict[str, list[Run]], accuracies: Sequence[float]) -> dict[str, Any]:
    """Compared by seed; intervals are over seeds."""
    ours, theirs = runs.values()
    pairs = list(zip(ours, theirs, strict=True))
    differences = {
        one.step: interval(a.evaluations[index].accuracy - b.evaluations[index].accuracy for a, b in pairs)
        for index, one in enumerate(ours[0].evaluations)
    }
    # One figure for the whole curve: intervals at each of many steps would exclude 0 by chance.
    overall = interval(_mean_accuracy(a) - _mean_accuracy(b) for a, b in pairs)
    to_levels = [
        ToAccuracy(
            accuracy=level,
            ours_cpu_s=[cpu_seconds_to(level, each.evaluations) for each in ours],
            theirs_cpu_s=[cpu_seconds_to(level, each.evaluations) for each in theirs],
        )
        for level in accuracies
    ]
    shared = min(each.cpu_s for of in runs.values() for each in of)
    ratios = [each.ratios() for each in to_levels]
    return {
        "step_ratio": statistics.median(b.step_cpu_s / a.step_cpu_s for a, b in pairs),
        "difference": overall,
        "difference_at_steps": [{"step": step, "difference": found} for step, found in differences.items()],
        "cpu_seconds_to": [
            {**msgspec.to_builtins(each), "ratios": found, "ratio": statistics.median(found) if found else None}
            for each, found in zip(to_levels, ratios, strict=True)
        ],
        "at_equal_cpu_s": {
            "cpu_s": shared,
            "accuracy": {name: [accuracy_at(shared, each.evaluations) for each in of] for name, of in runs.items()},
        },
        "reached": {
            "faster": all(len(found) == len(pairs) and statistics.median(found) >= TARGET for found in ratios),
            "as_accurate": overall.high >= 0,
            "as_accurate_at_each_step": all(found.high >= 0 for found in differences.values()),
        },
    }


def _mean_accuracy(one: Run) -> float:
    """Over the evaluations at equal steps."""
    return statistics.fmean(each.accuracy for each in one.evaluations[1:])


def _print(name: str, figures: dict[str, Any]) -> None:
    table = Table(title=f"{name}: CPU seconds to a held-out accuracy", box=box.SIMPLE)
    for column in ("accuracy", "ours", "TRL", "times fewer"):
        table.add_column(column, justify="right")
    for each in figures["cpu_seconds_to"]:
        seconds = (_seconds(each[key]) for key in ("ours_cpu_s", "theirs_cpu_s"))
        ratio = "-" if each["ratio"] is None else f"{each['ratio']:.2f} ({_range(each['ratios'])})"
        table.add_row(f"{each['accuracy']:.2f}", *seconds, ratio)
    Console(width=120).print(table)
    last: Interval = figures["difference_at_steps"][-1]["difference"]
    print(f"a step takes TRL {figures['step_ratio']:.2f} times as long; microbatches {figures['microbatch']}")
    overall: Interval = figures["difference"]
    print(f"accuracy over all steps, ours - TRL: {overall.value:+.3f} ({overall.low:+.3f} to {overall.high:+.3f})")
    print(f"accuracy after the last step, ours - TRL: {last.value:+.3f} ({last.low:+.3f} to {last.high:+.3f})")


def _seconds(found: Sequence[float | None]) -> str:
    return ", ".join("not reached" if each is None else f"{each:.0f}" for each in found)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


def _draw() -> None:
    panels = []
    for name in TASK_SETTINGS:
        path = RESULTS / f"learning_race_{name}.json"
        if path.exists():
            runs = msgspec.json.decode(path.read_bytes(), type=_File).runs
            panels += [_panel(name, runs, by="step"), _panel(name, runs, by="cpu_s")]
    if panels:
        write_chart(PICTURES / "learning_race.svg", "Held-out accuracy, against TRL's GRPOTrainer", panels)


class _File(msgspec.Struct):
    runs: dict[str, list[Run]]


def _panel(name: str, runs: dict[str, list[Run]], *, by: str) -> Panel:
    lines = []
    for colour, (side, of) in enumerate(runs.items()):
        for number, each in enumerate(of):
            points = each.evaluations
            line = Line(
                label=side if number == 0 else f"_{side}",
                xs=[getattr(point, by) for point in points],
                ys=[point.accuracy for point in points],
                colour=colour,
            )
            lines.append(line)
    what = "step" if by == "step" else "CPU seconds"
    return Panel(title=name, x_title=what, lines=lines, low=0.0, high=1.02)


if __name__ == "__main__":
    sys.exit(main())
