"""The RLHF recipe over seeds: duration, quality of the reward model, effect of PPO.

    python -m benchmarks.rlhf [--seeds 3] [--only 0,2] [--again]

@rlhf, one seed after another, with one compute thread. Minutes are wall-clock; CPU minutes on one thread
equal those of a quiet machine. The reward model is evaluated on pairs of held-out questions; the policy before and
after PPO on the same questions, by the reward model and by correctness: greedy, and as the share of correct samples.
Intervals and p-values of one seed are over questions, those of the summary over seeds.

Results of the same recipe in results/rlhf.json are kept. An interrupted seed resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.addition_runs import interval
from benchmarks.line_charts import PICTURES, Line, Panel, write_chart
from benchmarks.measuring import RESULTS, machine, write_result
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed, with_origin
from benchmarks.rlhf_runs import RECIPE, Change, RlhfRun, rlhf_run
from benchmarks.sft_start import CACHE
from benchmarks.stopping import interruptible
from tidemill.telemetry.statistics import Interval

NAME = "rlhf"
LONGEST_MINUTES, LEAST_ACCURACY, SURE = 20.0, 0.8, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description="Minutes, reward model, score and truth of the RLHF recipe.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="these seeds, separated by commas; others may run concurrently")
    parser.add_argument("--again", action="store_true", help="measure existing results again")
    options = parsed(parser)
    quiet()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.only.split(",")] if options.only else list(range(options.seeds))
    runs = measured(seeds, again=options.again, run=_run, write=_write)
    _print(runs)
    _draw(runs)
    return 0 if all(verdict(runs).values()) else 1


def measured(
    seeds: Sequence[int], *, again: bool, run: Callable[[int], RlhfRun], write: Callable[[Sequence[RlhfRun]], None]
) -> list[RlhfRun]:
    """Run the seeds that results/rlhf.json lacks for this recipe, or all; return all results."""
    for seed in seeds:
        if again or seed not in {one.seed for one in earlier_runs()}:
            found = run(seed)  # another call may have added its results meanwhile
            others = [one for one in earlier_runs() if one.seed != seed]
            write(sorted([*others, found], key=lambda one: one.seed))
    return earlier_runs()


def earlier_runs() -> list[RlhfRun]:
    """Results in results/rlhf.json of the current recipe."""
    path = RESULTS / f"{NAME}.json"
    try:
        found = msgspec.json.decode(path.read_bytes())
        runs = [with_origin(run, path, found) for run in found["runs"]]
        return msgspec.convert(runs, list[RlhfRun], str_keys=True) if found["recipe"] == _recipe() else []
    except (OSError, KeyError, TypeError, msgspec.MsgspecError):
        return []


def verdict(runs: Sequence[RlhfRun]) -> dict[str, bool]:
    """Each aim, and whether every seed reaches it."""
    return {
        f"at most {LONGEST_MINUTES:g} minutes of CPU": all(run.cpu_minutes <= LONGEST_MINUTES for run in runs),
        f"reward model right on {LEAST_ACCURACY:g} of pairs": all(run.pairs.accuracy >= LEAST_ACCURACY for run in runs),
        "reward-model score rises": all(_rises(run.score) for run in runs),
        "true greedy accuracy rises": all(_rises(run.accuracy) for run in runs),
        "true accuracy of samples rises": all(_rises(run.drawn) for run in runs),
    }


def beyond_chance(runs: Sequence[RlhfRun]) -> dict[str, int]:
    """For each increase, the seeds in which it is significant at 5 %."""
    changes = {
        "reward-model score": [run.score for run in runs],
        "true greedy accuracy": [run.accuracy for run in runs],
        "true accuracy of samples": [run.drawn for run in runs],
    }
    return {name: sum(_rises(change) and change.p_value < SURE for change in found) for name, found in changes.items()}


def _rises(change: Change) -> bool:
    return change.after > change.before


def _recipe() -> str:
    """A digest of the recipe."""
    return hashlib.blake2b(RECIPE.read_bytes(), digest_size=8).hexdigest()


def _run(seed: int) -> RlhfRun:
    smollm2()
    directory = CACHE / f"{NAME}-{_recipe()}" / f"seed-{seed}"
    found = rlhf_run(directory, seed)
    shutil.rmtree(directory)  # checkpoints take gigabytes
    print(f"seed {seed}: {found.minutes:.1f} minutes", flush=True)
    return found


OVER_SEEDS: dict[str, Callable[[RlhfRun], float]] = {
    "minutes": lambda run: run.minutes,
    "cpu_minutes": lambda run: run.cpu_minutes,
    "pairwise_accuracy": lambda run: run.pairs.accuracy,
    "score_difference": lambda run: run.score.after - run.score.before,
    "accuracy_before": lambda run: run.accuracy.before,
    "accuracy_after": lambda run: run.accuracy.after,
    "accuracy_difference": lambda run: run.accuracy.after - run.accuracy.before,
    "drawn_difference": lambda run: run.drawn.after - run.drawn.before,
    "kl_ref_k1": lambda run: run.last["kl_ref_k1"],
    "entropy_first": lambda run: run.first["entropy"],
    "entropy": lambda run: run.last["entropy"],
    "explained_variance": lambda run: run.last["explained_variance"],
}


def summary(runs: Sequence[RlhfRun]) -> dict[str, Interval]:
    """Means over seeds with their intervals."""
    return {name: interval(figure(run) for run in runs) for name, figure in OVER_SEEDS.items()}


def _write(runs: Sequence[RlhfRun]) -> None:
    figures: dict[str, Any] = {
        "recipe": _recipe(),
        "aims": verdict(runs),
        "reached": all(verdict(runs).values()),
        "seeds_beyond_chance": beyond_chance(runs),
        "over_seeds": {name: found._asdict() for name, found in summary(runs).items()},
        "runs": [msgspec.to_builtins(run, str_keys=True) for run in runs],
    }
    write_result(NAME, figures)


def _print(runs: Sequence[RlhfRun]) -> None:
    table = Table(title=f"@rlhf, SmolLM2-135M, one thread; {machine()['cpu']}", box=box.SIMPLE)
    columns = ("seed", "minutes (CPU)", "reward model right on", "its score", "true, greedy", "true, of samples")
    for column in (*columns, "KL, nats/token", "entropy", "explained variance"):
        table.add_column(column)
    for run in runs:
        pairs = run.pairs
        table.add_row(
            str(run.seed),
            f"{run.minutes:.1f} ({run.cpu_minutes:.1f})",
            f"{pairs.accuracy:.3f} ({pairs.low:.2f}-{pairs.high:.2f}) of {pairs.pairs} pairs, {pairs.questions} "
            "questions",
            _told(run.score),
            _told(run.accuracy),
            _told(run.drawn),
            f"{run.last['kl_ref_k1']:.2f}",
            f"{run.first['entropy']:.2f} → {run.last['entropy']:.2f}",
            f"{run.last['explained_variance']:.2f}",
        )
    found = summary(runs)
    table.add_row(
        "all",
        f"{found['minutes'].value:.1f} ({found['cpu_minutes'].value:.1f})",
        _between(found["pairwise_accuracy"]),
        f"+{_between(found['score_difference'])}",
        f"+{_between(found['accuracy_difference'])}",
        f"+{_between(found['drawn_difference'])}",
        f"{found['kl_ref_k1'].value:.2f}",
        f"{found['entropy_first'].value:.2f} → {found['entropy'].value:.2f}",
        f"{found['explained_variance'].value:.2f}",
    )
    Console(width=190).print(table)
    for aim, reached in verdict(runs).items():
        print(f"{'reached' if reached else 'MISSED '}  {aim}")
    for name, seeds in beyond_chance(runs).items():
        print(f"{name}: significant increase (p < {SURE:g}) in {seeds} of {len(runs)} seeds")


def _told(change: Change) -> str:
    return f"{change.before:.3f} → {change.after:.3f} (n = {change.n}, p = {change.p_value:.1g})"


def _between(found: Interval) -> str:
    return f"{found.value:.3f} ({found.low:.2f}-{found.high:.2f})"


def _draw(runs: Sequence[RlhfRun]) -> None:
    """PPO step by step, for each seed."""
    curves = (
        ("Reward-model score of a batch", "reward_mean", None),
        ("KL to the reference, nats per token", "kl_ref_k1", None),
        ("Entropy, nats per token", "entropy", 0.0),
        ("The critic's explained variance", "explained_variance", None),
    )
    held_out = [
        Line(label=f"seed {run.seed}", xs=_xs(run.held_out), ys=_ys(run.held_out), colour=run.seed) for run in runs
    ]
    panels = [Panel(title="True accuracy, held out, greedy", x_title="step", lines=held_out, low=0.0, high=1.0)]
    for title, name, low in curves:
        lines = [
            Line(label=f"seed {run.seed}", xs=_xs(run.curves[name]), ys=_ys(run.curves[name]), colour=run.seed)
            for run in runs
        ]
        panels.append(Panel(title=title, x_title="step", lines=lines, low=low))
    write_chart(PICTURES / f"{NAME}.svg", "PPO with a reward model (@rlhf)", panels, columns=3)


def _xs(points: dict[int, float]) -> list[float]:
    return [float(step) for step in points]


def _ys(points: dict[int, float]) -> list[float]:
    return list(points.values())


if __name__ == "__main__":
    sys.exit(interruptible(main, keeps=True))
