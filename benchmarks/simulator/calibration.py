"""What of the profiles is fitted to the published system, and to which figures: the static ones, and nothing else.

    python -m benchmarks.simulator.calibration [ROW ...]

Fitted are, for 8B, how many samples an engine decodes at once, the shares of the peaks that engines and trainer reach,
to five figures: colocated tokens per second and what 1 to 4 instances make of it. 14B has the same three; fitted is its
mean length alone, to two figures: 1 and 6 instances. That of 8B is assumed. The search goes from coarse to fine, by the
squared differences of logarithms; each candidate is a simulated run of the published policy with a fixed number of
instances, the first steps of which are left out: the windows settle there.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor

import msgspec

from statistics import fmean

from benchmarks.simulator.published_system import (
    COLOCATED_TOKENS_PER_S,
    SPEEDUPS,
    Calibration,
    plant,
    published_spec,
    published_twins,
    workload,
)
from tidemill.core.records import Record
from tidemill.pool.static import static_timetable
from tidemill.sim.run import simulate_run

STEPS, MEASURED = 12, 6
"""Steps simulated with instances, and of those the last ones that count."""
COLOCATED_STEPS = 6


class Steady(Record):
    """A run with a fixed number of instances, in its last steps."""

    tokens_per_s: float
    window_s: float
    step_s: float
    train_s: float


def steady(row: str, fitted: Calibration, instances: int) -> Steady:
    steps = STEPS if instances else COLOCATED_STEPS
    run = simulate_run(
        published_spec(steps=steps),
        plant(row, fitted),
        workload(fitted),
        static_timetable(instances) if instances else None,
        most_workers=instances,
        twins=published_twins(),
    )
    first = max(steps - MEASURED, 1)
    lines, began_s = run.metrics[first:], run.metrics[first - 1].elapsed_s
    return Steady(
        tokens_per_s=sum(line.values["tokens_trained"] for line in lines) / (run.seconds - began_s),
        window_s=fmean(line.values.get("seed_window_s", 0.0) for line in lines),
        step_s=(run.seconds - began_s) / len(lines),
        train_s=fmean(line.values["time_train_s"] for line in lines),
    )
