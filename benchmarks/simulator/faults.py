"""Fault simulation at scale: violations, and CPU time per seed.

    python -m benchmarks.simulator.faults [--seeds 10000]

Runs what `make faults` runs, and measures the time of every seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean

from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from benchmarks.simulator.segments import CORES
from benchmarks.subjects import check_counts
from tests.fault_simulation.seed_run import Outcome, simulate_faults

SEEDS, TARGET_S = 10_000, 0.3
CHUNK = 20


def timed(seed: int) -> tuple[Outcome, float]:
    began_s = time.process_time()
    return simulate_faults(seed), time.process_time() - began_s


def check_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Raises RuntimeError: no controller was killed and restarted, or a seed never checked the invariants."""
    restarts = sum(outcome.lives - 1 for outcome in outcomes)
    check_counts("faults", restarts=restarts, checks=min((outcome.looks for outcome in outcomes), default=0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    seeds = parsed(parser).seeds
    outcomes, cpu_s = list[Outcome](), list[float]()
    with ProcessPoolExecutor(CORES) as pool:
        for outcome, seconds in pool.map(timed, range(seeds), chunksize=CHUNK):
            outcomes.append(outcome)
            cpu_s.append(seconds)
            if outcome.violation:
                print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
            if len(outcomes) % (seeds // 20 or 1) == 0:
                print(f"{len(outcomes)} of {seeds} seeds", file=sys.stderr, flush=True)
    check_outcomes(outcomes)
    violated = [outcome.seed for outcome in outcomes if outcome.violation]
    lives = sum(outcome.lives for outcome in outcomes)
    print(f"{seeds} seeds, {lives} lives of the controller: {len(violated)} violations")
    print(f"CPU time of a seed: {fmean(cpu_s):.3f} s on average, {max(cpu_s):.2f} s at most; target {TARGET_S} s")
    if seeds == SEEDS:
        found = {"seeds": seeds, "lives": lives, "violated": violated, "target_s": TARGET_S}
        write_result("simulator_faults", {**found, "cpu_s_mean": fmean(cpu_s), "cpu_s_most": max(cpu_s)})
    return 1 if violated or fmean(cpu_s) > TARGET_S else 0


if __name__ == "__main__":
    sys.exit(main())
