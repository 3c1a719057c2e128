"""Whether evictions change what a run learns.

    python -m benchmarks.equivalence [--only char,twins,curves] [--seeds 3]

- *char*: runs of the character model, batch-invariant, with and without evictions: tokens, logprobs, rewards, weights
after every step and the final checkpoint, compared bit by bit.
- *twins*: SmolLM2 in fast mode. Every batch is generated twice from the same weights, undisturbed and with evictions;
differences are explained.
- *curves*: held-out accuracy over seeds of the demo with and without evictions.

Evictions of the first two are scripted (see `benchmarks.saboteur`), those of the third come from the recipe's pool. A
part fails if no sample moved. Parts that are not run keep their results in results/equivalence.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.equivalent_runs import compare, digests, disturbed_run, quiet_run
from benchmarks.learning_curves import RECIPE_FILES, Curve, Point, check_curve, curve, points
from benchmarks.measuring import print_records, write_part
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.saboteur import Eviction
from benchmarks.subjects import check_counts
from benchmarks.twin_batches import losses, twin_run

IDENTICAL_SHARE = 0.99
TOTALS = ("evictions", "evictions_noticed", "migrations", "tokens_generated", "tokens_kept", "tokens_recomputed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", default="char,twins,curves", help="parts, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="for char and curves")
    parser.add_argument("--char-steps", type=int, default=20)
    parser.add_argument("--twin-steps", type=int, default=10)
    options = parsed(parser)
    quiet()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "char": lambda folder: char_part(folder, seeds=options.seeds, steps=options.char_steps),
        "twins": lambda folder: twins_part(folder, steps=options.twin_steps),
        "curves": lambda folder: curves_part(folder, seeds=options.seeds),
    }
    reached = True
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="tidemill-equivalence-") as folder:
            figures = parts[name](Path(folder))
        write_part("equivalence", name, figures, parts=tuple(parts))
        reached = reached and figures["reached"]
    return 0 if reached else 1


def char_part(folder: Path, *, seeds: int, steps: int) -> dict[str, Any]:
    """Two runs per seed."""
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        here = [folder / f"{kind}-{seed}" for kind in ("quiet", "disturbed")]
        quiet_run(here[0], steps=steps, seed=seed)
        found = disturbed_run(here[1], steps=steps, seed=seed)
        runs.append(
            {
                "seed": seed,
                "steps": steps,
                "steps_that_learned": len(set(digests(here[0]))) - 1,
                **msgspec.to_builtins(compare(*here)),
                **{name: found.summary[name] for name in TOTALS},
                **_by_cue(found.evictions),
                **losses(found.evictions),
                "tokens_lost_as_estimated": found.summary["tokens_lost"],
            }
        )
        check_disturbed(runs[-1])
    print_records("character model, batch-invariant: quiet run against disturbed run", runs)
    same = all(run["differing_samples"] == run["differing_steps"] == 0 and run["same_files"] for run in runs)
    kept = all(run["lost_more_than_a_tick"] == run["lost_after_notice"] == 0 for run in runs)
    return {"runs": runs, "reached": same and kept}


def check_disturbed(run: Mapping[str, Any]) -> None:
    """Raises RuntimeError: no sample moved, no token was lost, or not every step changed the weights."""
    check_counts(
        f"seed {run['seed']}", **{name: run[name] for name in ("evictions", "migrations", "tokens_kept", "tokens_lost")}
    )
    if run["steps_that_learned"] < run["steps"]:
        raise RuntimeError(f"seed {run['seed']}: only {run['steps_that_learned']} of {run['steps']} steps learned")


def _by_cue(evictions: Sequence[Eviction]) -> dict[str, Any]:
    """Evictions of each kind, the most tokens lost by one, and the tokens of a tick."""
    cues = list(dict.fromkeys(one.cue for one in evictions))
    return {
        **{cue: sum(one.cue == cue for one in evictions) for cue in cues},
        **{f"{cue}_most_lost": max(one.tokens_lost for one in evictions if one.cue == cue) for cue in cues},
        "tokens_of_a_tick": max(one.tick_tokens for one in evictions),
        "most_ticks_after_notice": max(one.ticks_after_notice for one in evictions),
    }


def twins_part(folder: Path, *, steps: int) -> dict[str, Any]:
    smollm2()
    figures = twin_run(folder / "run", steps=steps)
    print_records("SmolLM2, fast mode: every batch generated twice from the same weights", figures["by_step"])
    if figures["differences"]:
        print_records("where samples part", figures["differences"])
    kept = figures["lost_more_than_a_tick"] == figures["lost_after_notice"] == 0
    return {**figures, "reached": figures["identical_share"] >= IDENTICAL_SHARE and kept}


def curves_part(folder: Path, *, seeds: int) -> dict[str, Any]:
    smollm2()
    curves: dict[str, list[Curve]] = {kind: [] for kind in RECIPE_FILES}
    for seed in range(seeds):
        for kind, of_kind in curves.items():
            of_kind.append(curve(folder, kind, seed))
            check_curve(kind, of_kind[-1])
            print(of_kind[-1], flush=True)
    found = points(curves)
    print_records("demo: held-out greedy accuracy, mean over seeds (lowest-highest)", [_row(point) for point in found])
    return {
        "seeds": seeds,
        "points": msgspec.to_builtins(found),
        "runs": {kind: msgspec.to_builtins(of_kind, str_keys=True) for kind, of_kind in curves.items()},
        # With one seed there is no noise estimate.
        "reached": all(point.noise is None or abs(point.difference) <= point.noise for point in found),
    }


def _row(point: Point) -> dict[str, Any]:
    cells = {
        kind: f"{mean:.3f} ({point.spreads[kind][0]:.2f}-{point.spreads[kind][1]:.2f})"
        for kind, mean in point.means.items()
    }
    noise = "-" if point.noise is None else f"{point.noise:.3f}"
    return {"step": point.step, **cells, "difference": f"{point.difference:+.3f}", "noise": noise}


if __name__ == "__main__":
    sys.exit(main())
