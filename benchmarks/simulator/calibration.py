"""What of the profiles is fitted to the published system, and to which of its figures: the static ones, nothing else.

    python -m benchmarks.simulator.calibration [8B|14B ...]

Fitted are four numbers to seven figures. For 8B: how many samples an engine decodes at once, and which shares of the
peaks engines and trainer reach; to tokens per second colocated, and what 1 to 4 instances make of it. For 14B, whose
shares are those of 8B, only the samples; to what 1 and 6 instances make of it. Lengths are assumed, but for their
correlation within a prompt.

Of the candidates, those around what first trials suggested, the one with the least sum of squared differences of
logarithms is taken. Each is judged by simulated runs of the published policy with a fixed number of instances, in their
last steps: the seeding window settles in the first ones.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from benchmarks.simulator.published_system import (
    BASELINE,
    COLOCATED_TOKENS_PER_S,
    FITTED,
    GROUP,
    SPEEDUPS,
    Calibration,
    plant,
    published_spec,
    workload,
)
from tidemill.core.records import Record
from tidemill.pool.static import static_timetable
from tidemill.sim.rlboost import rlboost_twins
from tidemill.sim.run import simulate_run

STEPS, MEASURED = 20, 14
"""Steps simulated with instances, and of those the last ones that count."""
COLOCATED_STEPS = 10
CANDIDATES = {
    "8B": list(product((128, 160, 192), (0.5, 0.55, 0.6), (0.37, 0.41, 0.45))),
    "14B": list(product((40, 48, 56, 64), (FITTED["8B"].bandwidth,), (FITTED["8B"].compute,))),
}
"""Slots, bandwidth, compute."""
MEAN_TOKENS = 5000.0


class Steady(Record):
    """A run with a fixed number of instances, in its last steps."""

    tokens_per_s: float
    window_s: float
    step_s: float
    train_s: float
    trainer_wait_s: float  # by the offload's rule


def steady(row: str, fitted: Calibration, instances: int, **fleet: Any) -> Steady:
    """
    Args:
        fleet: keys of [fleet] that are not as published.
    """
    steps = STEPS if instances else COLOCATED_STEPS
    run = simulate_run(
        published_spec(steps=steps, **fleet),
        plant(row, fitted),
        workload(fitted),
        static_timetable(instances) if instances else None,
        most_workers=instances,
        twins=rlboost_twins(GROUP) if instances else BASELINE,
    )
    first = max(steps - MEASURED, 1)
    lines, began_s = run.metrics[first:], run.metrics[first - 1].elapsed_s
    return Steady(
        tokens_per_s=sum(line.values["tokens_trained"] for line in lines) / (run.seconds - began_s),
        window_s=fmean(line.values.get("seed_window_s", 0.0) for line in lines),
        step_s=(run.seconds - began_s) / len(lines),
        train_s=fmean(line.values["time_train_s"] for line in lines),
        trainer_wait_s=fmean(line.values.get("time_trainer_wait_s", 0.0) for line in lines),
    )


def differences(row: str, found: Mapping[int, Steady]) -> dict[str, float]:
    """Simulated over published throughput, as logarithms, by figure."""
    colocated = found[0].tokens_per_s
    ratios = {
        f"with {instances}": math.log(found[instances].tokens_per_s / colocated / published)
        for instances, published in SPEEDUPS[row].items()
    }
    return ratios | ({"colocated": math.log(colocated / COLOCATED_TOKENS_PER_S)} if row == "8B" else {})


def _error(row: str, fitted: Calibration, pool: ProcessPoolExecutor) -> float:
    counts = (0, *SPEEDUPS[row])
    found = dict(zip(counts, pool.map(partial(steady, row, fitted), counts), strict=True))
    off = differences(row, found)
    error = sum(difference**2 for difference in off.values())
    told = ", ".join(f"{name} {math.expm1(difference):+.1%}" for name, difference in off.items())
    print(f"{row} {fitted}: {told}; {error:.5f}", flush=True)
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(CANDIDATES), help="8B, 14B")
    with ProcessPoolExecutor(2) as pool:
        for row in parser.parse_args().rows:
            candidates = [
                Calibration(slots=slots, bandwidth=bandwidth, compute=compute, mean_tokens=MEAN_TOKENS)
                for slots, bandwidth, compute in CANDIDATES[row]
            ]
            print(f"{row}: {min(candidates, key=lambda fitted: _error(row, fitted, pool))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
