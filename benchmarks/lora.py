"""What an adapter saves: memory, checkpoints and published bytes of a LoRA run against a full fine-tune of SmolLM2.

    python -m benchmarks.lora [--steps N]

Memory: `tidemill train` on the demo's recipe, each run a process of its own, as a user would start it; its peak is the
largest resident set it ever had. Publishing: both trained at the learning rate they learn at, published in bf16 after
every step as workers elsewhere would pull them (an adapter's base, which they pull once, is not counted).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import BYTES_PER_GB, write_result
from benchmarks.models import quiet, smollm2
from benchmarks.weights_delta import RECIPE, publishes_of_a_run

STEPS = 5
DEADLINE_S = 1200.0
WHOLE, ADAPTER = "whole model", "LoRA, rank 8"
LORA = ("--model.lora.rank=8",)
SIDES: Mapping[str, tuple[float, Sequence[str]]] = {WHOLE: (1e-5, ()), ADAPTER: (3e-4, LORA)}  # learning rate, more
REFERENCES: Mapping[str, Sequence[str]] = {"no reference": (), "KL to a reference": ("--algorithm.kl_beta=0.001",)}
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
    """Medians over the steps, in bytes; deltas are against the version before."""

    side: str
    snapshot_nbytes: float
    pulled_nbytes: float  # delta or snapshot, whichever is less, and manifests


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and bytes of LoRA against a full fine-tune.")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    options = parser.parse_args()
    quiet()
    model = smollm2()
    memory = [_memory(side, reference, options.steps) for reference in REFERENCES for side in SIDES]
    published = [_published(model, side, options.steps) for side in SIDES]
    shares = {
        reference: _share(one.peak_rss_bytes for one in memory if one.reference == reference)
        for reference in REFERENCES
    }
    snapshot_share = _share(one.snapshot_nbytes for one in published)
    _print(memory, published)
    figures = {
        "recipe": RECIPE.name,
        "memory": [vars(one) for one in memory],
        "published": [vars(one) for one in published],
        "memory_share": shares,
        "published_share": snapshot_share,
        "reached": {
            "memory": max(shares.values()) < TARGET_MEMORY,
            "published": snapshot_share < TARGET_PUBLISHED,
        },
    }
    write_result("lora" if options.steps == STEPS else "lora-partial", figures)
    return 0


def _memory(side: str, reference: str, steps: int) -> Memory:
    rate, more = SIDES[side]
    with tempfile.TemporaryDirectory(prefix="tidemill-lora-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "tidemill", "train", f"@{RECIPE}", "--json", "--run.dir", str(run)]
        command += ["--trainer.steps", str(steps), "--trainer.threads", "1", "--checkpoint.every_steps", "0"]
        command += ["--eval.every_steps", "0", "--eval.prompts", "8", "--optimizer.learning_rate", str(rate)]
        command += [*more, *REFERENCES[reference]]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
        if done.returncode != 0:
            raise RuntimeError(f"`{' '.join(command)}` ended with {done.returncode}")
        summary: dict[str, Any] = json.loads(done.stdout)
        steps_s = [json.loads(line).get("time_step_s") for line in (run / "metrics.jsonl").read_text().splitlines()]
        files = (run / "checkpoints").rglob("*")
        return Memory(
            side=side,
            reference=reference,
            peak_rss_bytes=summary["peak_rss_bytes"],
            checkpoint_bytes=sum(path.stat().st_size for path in files if path.is_file()),
            step_s=statistics.median(seconds for seconds in steps_s if seconds is not None),
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
    """Of the adapter's figure in the whole model's."""
    whole, adapter = figures
    return float(adapter / whole)


def _print(memory: Sequence[Memory], published: Sequence[Published]) -> None:
    console = Console(width=140)
    table = Table(title=f"memory (target: under {TARGET_MEMORY:.0%})", box=box.SIMPLE)
    for column in ("", "peak RSS GB", "of the whole model's", "checkpoint GB", "s / step"):
        table.add_column(column, justify="right" if column else "left")
    for one in memory:
        whole = next(other for other in memory if other.reference == one.reference)
        table.add_row(
            f"{one.side}, {one.reference}",
            f"{one.peak_rss_bytes / BYTES_PER_GB:.2f}",
            f"{one.peak_rss_bytes / whole.peak_rss_bytes:.1%}",
            f"{one.checkpoint_bytes / BYTES_PER_GB:.3f}",
            f"{one.step_s:.1f}",
        )
    console.print(table)
    table = Table(title=f"published in bf16 (target: under {TARGET_PUBLISHED:.0%} of the snapshot)", box=box.SIMPLE)
    for column in ("", "snapshot MB", "of the whole model's", "pulled MB", "of the whole model's snapshot"):
        table.add_column(column, justify="right" if column else "left")
    full = published[0].snapshot_nbytes
    for side in published:
        table.add_row(
            side.side,
            f"{side.snapshot_nbytes / 1e6:.2f}",
            f"{side.snapshot_nbytes / full:.2%}",
            f"{side.pulled_nbytes / 1e6:.2f}",
            f"{side.pulled_nbytes / full:.2%}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
