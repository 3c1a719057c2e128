"""Fits two numbers of the profiles to the published static figures of 8B.

    python -m benchmarks.simulator.calibration

The shares of the peaks that engines and trainer reach are fitted to 8B's tokens per second colocated and with 1 to 4
instances. The number of samples an engine decodes at once follows from its memory and the lengths
(`published_system.engines`). 14B, other lengths and other numbers of machines are predictions. Lengths are assumed,
except their correlation within a prompt.

The candidate with the least sum of squared differences of logarithms is selected, from a grid around first trials. Each
is evaluated by simulated runs of the published policy with a fixed number of instances, in their last steps, after the
seeding window has settled.
"""

from __future__ import annotations

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
    GROUP,
    SETTING,
    SPEEDUPS,
    Calibration,
    Setting,
    cost_model,
    published_spec,
    workload,
)
from tidemill.core.records import Record
from tidemill.pool.build_provider import static_timetable
from tidemill.sim.baselines import rlboost_components
from tidemill.sim.simulation import simulate_run

STEPS, MEASURED = 20, 14
"""Simulated steps with instances, and the number of last steps that count."""
COLOCATED_STEPS = 10
ROW = "8B"
CANDIDATES = list(product((0.45, 0.5, 0.55, 0.6), (0.37, 0.41, 0.45, 0.49, 0.53, 0.57)))
"""Bandwidth, compute."""


class Steady(Record):
    """A run with a fixed number of instances, in its last steps."""

    tokens_per_s: float
    window_s: float
    step_s: float
    train_s: float
    trainer_wait_s: float  # as the offload policy counts it


def steady(row: str, fitted: Calibration, instances: int, *, setting: Setting = SETTING, **fleet: Any) -> Steady:
    """Simulate a fixed number of instances.

    Args:
        fleet: [fleet] keys that differ from the published ones.
    """
    steps = STEPS if instances else COLOCATED_STEPS
    run = simulate_run(
        published_spec(steps=steps, **fleet),
        cost_model(row, fitted, setting),
        workload(setting),
        static_timetable(instances) if instances else None,
        most_workers=instances,
        factories=rlboost_components(GROUP) if instances else BASELINE,
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


def differences(found: Mapping[int, Steady]) -> dict[str, float]:
    """Simulated over published throughput of 8B, as logarithms, by figure."""
    colocated = found[0].tokens_per_s
    ratios = {
        f"with {instances}": math.log(found[instances].tokens_per_s / colocated / published)
        for instances, published in SPEEDUPS[ROW].items()
    }
    return ratios | {"colocated": math.log(colocated / COLOCATED_TOKENS_PER_S)}


def _error(fitted: Calibration, pool: ProcessPoolExecutor) -> float:
    counts = (0, *SPEEDUPS[ROW])
    found = dict(zip(counts, pool.map(partial(steady, ROW, fitted), counts), strict=True))
    off = differences(found)
    error = sum(difference**2 for difference in off.values())
    told = ", ".join(f"{name} {math.expm1(difference):+.1%}" for name, difference in off.items())
    print(f"{fitted}: {told}; {error:.5f}", flush=True)
    return error


def main() -> int:
    with ProcessPoolExecutor(2) as pool:
        candidates = [Calibration(bandwidth=bandwidth, compute=compute) for bandwidth, compute in CANDIDATES]
        print(min(candidates, key=lambda fitted: _error(fitted, pool)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
