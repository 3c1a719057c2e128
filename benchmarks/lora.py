"""Memory, checkpoint and published bytes of a LoRA run and a full fine-tune of SmolLM2, and how fast each learns.

    python -m benchmarks.lora [--steps N] [--only memory,published,learning] [--seeds 3]

Memory: `tidemill train` on the demo's recipe, each run in a separate process; the peak resident set. Publishing: both
trained at a working learning rate, published in bf16 after every step as remote workers would pull them (without the
adapter's base, which they pull once). Learning: GRPO on two-digit addition from the start of `benchmarks.sft_start`;
the full model at the learning rate of `benchmarks.algorithms`, the adapter at the better of 1e-3 and 3e-3, tried with
one seed.

With `--only`, figures of the other parts stay as in results/lora.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.addition_runs import TARGET, AdditionRun, addition_run, check_start, interval, of_case, spread
from benchmarks.measuring import BYTES_PER_GB, RESULTS, exit_code, write_result
from benchmarks.models import quiet, smollm2
from benchmarks.origin import origin, origin_of, parsed
from benchmarks.sft_start import sft_start
from benchmarks.subjects import check_models
from benchmarks.training_run import train
from benchmarks.weights_delta import RECIPE, publishes_of_a_run
from tidemill.telemetry.metrics import STEP_TIME, read_metrics

STEPS = 5
DEADLINE_S = 1200.0
WHOLE, ADAPTER = "whole model", "LoRA, rank 8"
LORA = ("--model.lora.rank=8",)
SIDES: Mapping[str, tuple[float, Sequence[str]]] = {WHOLE: (1e-5, ()), ADAPTER: (3e-4, LORA)}  # learning rate, more
REFERENCES: Mapping[str, Sequence[str]] = {"no reference": (), "KL to a reference": ("--algorithm.kl_beta=0.001",)}
LEARNING: Mapping[str, dict[str, Any]] = {
    WHOLE: {"optimizer": {"learning_rate": 1e-4}},
    ADAPTER: {"optimizer": {"learning_rate": 1e-3}, "model": {"lora": {"rank": 8}}},
}
LEARNING_STEPS = 60
TARGET_MEMORY, TARGET_PUBLISHED = 0.60, 0.02


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One run."""

    side: str
    reference: str
    peak_rss_bytes: int
    checkpoint_bytes: int
    step_s: float  # median


@dataclass(frozen=True, kw_only=True)
class Published:
    """Medians over the steps, in bytes; deltas are to the previous version."""

    side: str
    snapshot_nbytes: float
    pulled_nbytes: float  # the smaller of delta and snapshot, plus manifests


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory, bytes and learning of LoRA against a full fine-tune.")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run that is measured for memory and bytes")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="of each run that learns")
    options = parsed(parser)
    quiet()
    name = "lora" if options.steps == STEPS else "lora-partial"
    figures = _earlier(name)
    for part in options.only.split(","):
        found = PARTS[part](options)
        reached = figures.get("reached", {}) | found.get("reached", {})
        figures |= found | {"reached": reached, "origins": figures["origins"] | {part: origin()}}
    write_result(name, figures)
    return exit_code(figures)


def _earlier(name: str) -> dict[str, Any]:
    """Earlier figures, and the origin of each part."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = {key: found[key] for key in found if key not in ("benchmark", "machine", "origin")}
    return {"origins": {part: origin_of(path, found) for part in PARTS if part in found}} | kept


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    found = [_memory(side, reference, options.steps) for reference in REFERENCES for side in SIDES]
    shares = {
        reference: _share(one.peak_rss_bytes for one in found if one.reference == reference) for reference in REFERENCES
    }
    _print_memory(found)
    return {
        "recipe": RECIPE.name,
        "memory": [vars(one) for one in found],
        "memory_share": shares,
        "reached": {"memory": max(shares.values()) < TARGET_MEMORY},
    }


def measure_published(options: argparse.Namespace) -> dict[str, Any]:
    model = smollm2()
    found = [_published(model, side, options.steps) for side in SIDES]
    share = _share(one.snapshot_nbytes for one in found)
    _print_published(found)
    return {
        "published": [vars(one) for one in found],
        "published_share": share,
        "reached": {"published": share < TARGET_PUBLISHED},
    }


def measure_learning(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    start, runs = sft_start(), list[AdditionRun]()
    for seed in range(options.seeds):
        for side, changes in LEARNING.items():
            changes = changes | {"eval": {"every_steps": 2}}
            run = addition_run(start, side, seed=seed, steps=LEARNING_STEPS, changes=changes, metrics=())
            runs.append(run)
            print(f"{side}, seed {seed}: accuracy {run.accuracy[LEARNING_STEPS]:.3f}", flush=True)
    check_start(runs)
    _print_learning(runs)
    return {
        "learning": [
            {
                "side": side,
                "seeds": len(here := of_case(runs, side)),
                "learning_rate": here[0].learning_rate,
                "steps": LEARNING_STEPS,
                "accuracy_before": [run.accuracy[0] for run in here],
                "accuracy_after": [run.accuracy[LEARNING_STEPS] for run in here],
                "steps_to_target": [run.steps_to_target for run in here],
                "cpu_s_per_step": [run.cpu_s / run.steps for run in here],
            }
            for side in LEARNING
        ]
    }


PARTS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "memory": measure_memory,
    "published": measure_published,
    "learning": measure_learning,
}


def _memory(side: str, reference: str, steps: int) -> Memory:
    rate, more = SIDES[side]
    with tempfile.TemporaryDirectory(prefix="tidemill-lora-") as folder:
        run = Path(folder) / "run"
        arguments = ["--trainer.steps", str(steps), "--trainer.threads", "1", "--checkpoint.every_steps", "0"]
        arguments += ["--eval.every_steps", "0", "--eval.prompts", "8", "--optimizer.learning_rate", str(rate)]
        summary = train(RECIPE, run, *arguments, *more, *REFERENCES[reference], deadline_s=DEADLINE_S)
        lines = read_metrics(run / "metrics.jsonl")
        check_models(f"{side}, {reference}", lines, reference=bool(REFERENCES[reference]))
        files = (run / "checkpoints").rglob("*")
        return Memory(
            side=side,
            reference=reference,
            peak_rss_bytes=summary["peak_rss_bytes"],
            checkpoint_bytes=sum(path.stat().st_size for path in files if path.is_file()),
            step_s=statistics.median(line.values[STEP_TIME] for line in lines if STEP_TIME in line.values),
        )


def _published(model: Path, side: str, steps: int) -> Published:
    rate, more = SIDES[side]
    publishes = publishes_of_a_run(model, learning_rate=rate, steps=steps, more=more)
    return Published(
        side=side,
        snapshot_nbytes=statistics.median(one.full_nbytes for one in publishes),
        pulled_nbytes=statistics.median(one.pulled_nbytes for one in publishes),
    )


def _share(figures: Any) -> float:
    """The adapter's figure relative to the full model's."""
    whole, adapter = figures
    return float(adapter / whole)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE)
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    return table


def _show(table: Table) -> None:
    Console(width=140).print(table)


def _print_memory(memory: Sequence[Memory]) -> None:
    title = f"memory (target: under {TARGET_MEMORY:.0%})"
    table = _table(title, "peak RSS GB", "of the whole model's", "checkpoint GB", "s / step")
    for one in memory:
        whole = next(other for other in memory if other.reference == one.reference)
        table.add_row(
            f"{one.side}, {one.reference}",
            f"{one.peak_rss_bytes / BYTES_PER_GB:.2f}",
            f"{one.peak_rss_bytes / whole.peak_rss_bytes:.1%}",
            f"{one.checkpoint_bytes / BYTES_PER_GB:.3f}",
            f"{one.step_s:.1f}",
        )
    _show(table)


def _print_published(published: Sequence[Published]) -> None:
    title = f"published in bf16 (target: under {TARGET_PUBLISHED:.0%} of the snapshot)"
    table = _table(title, "snapshot MB", "of the whole model's", "pulled MB", "of the whole model's snapshot")
    full = published[0].snapshot_nbytes
    for side in published:
        table.add_row(
            side.side,
            f"{side.snapshot_nbytes / 1e6:.2f}",
            f"{side.snapshot_nbytes / full:.2%}",
            f"{side.pulled_nbytes / 1e6:.2f}",
            f"{side.pulled_nbytes / full:.2%}",
        )
    _show(table)


def _print_learning(runs: Sequence[AdditionRun]) -> None:
    title = f"two-digit addition, {LEARNING_STEPS} steps of GRPO, mean over seeds"
    table = _table(title, "accuracy before", "after", "95 %", f"steps to {TARGET:g}", "CPU s / step")
    for side in LEARNING:
        here = of_case(runs, side)
        after = interval(run.accuracy[LEARNING_STEPS] for run in here)
        table.add_row(
            side,
            f"{statistics.fmean(run.accuracy[0] for run in here):.3f}",
            f"{after.value:.3f}",
            f"{after.low:.3f}-{after.high:.3f}",
            spread((run.steps_to_target for run in here), 1),
            f"{statistics.fmean(run.cpu_s / run.steps for run in here):.3f}",
        )
    _show(table)


if __name__ == "__main__":
    sys.exit(main())
