"""The published system in our simulation, compared with its published figures.

    python -m benchmarks.simulator.published

RLBoost's policy (arXiv 2510.19225), run by the real controller, for its 8B and 14B rows, on given availability
(`availability.py`). Two numbers are fitted to static figures of 8B (`calibration.py`); all rows not marked "fitted" are
predictions. Targets: throughput within 10 %, ablations within a factor of 1.5.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean, stdev
from typing import Any

from msgspec import to_builtins
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from benchmarks.simulator.availability import SEED
from benchmarks.simulator.calibration import Steady, steady
from benchmarks.simulator.published_system import (
    BASELINE,
    COLOCATED_TOKENS_PER_S,
    DYNAMIC_SPEEDUP,
    FITTED,
    FOUND_WINDOWS_S,
    GROUP,
    MEMORY,
    NO_SEEDING,
    OVER_DOUBLED,
    SAVED_BY_MIGRATING,
    SHORT,
    SHORT_SPEEDUP,
    SPEEDUPS,
    TOKENS_PER_USD,
    WINDOWS_S,
    Setting,
    cost_model,
    published_spec,
    workload,
)
from benchmarks.simulator.segments import (
    COLOCATED,
    CORES,
    ENDLESS,
    Outcome,
    System,
    Total,
    check_evictions,
    play,
    play_all,
    published_system,
    total,
)
from tidemill.pool.provider import Change
from tidemill.sim.baselines import Moved, rlboost_components
from tidemill.sim.simulation import simulate_run

WITHIN, FACTOR = 0.1, 1.5
ABLATIONS: dict[str, dict[str, Any]] = {
    "published": {},
    "no seeding": {"seeding": False},
    "no memory": {"remember_windows": False},
}
CASES = [
    *((row, name) for row in ("8B", "14B") for name in (COLOCATED, "published")),
    ("14B", "no seeding"),
    ("14B", "no memory"),
]

MIGRATING: Moved = "unfinished"
ANEW: dict[Moved, tuple[str, bool]] = {
    "requests anew": ("saved by migrating", True),
    "samples anew": ("same, finished samples kept", False),
}
"""Variants without migration: their labels, and whether they are compared with the published figure."""
KILLED_STEP, KILLED, KILLED_RUNS = 6, 3, 20
"""The step in which instances are killed, how many, and the number of runs, with equal seeds with and without
migration."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table."""

    figure: str
    published: float
    simulated: float
    kind: str  # fitted or predicted
    asked: str = ""  # required accuracy; empty without a target
    reached: bool | None = None
    error: float | None = None  # standard error of the simulated value, if repeated


def run_case(row: str, name: str, segment: str | None, *, seed: int = SEED) -> Outcome:
    if name == COLOCATED:
        return play(row, System(spec=published_spec(steps=ENDLESS), factories=BASELINE), segment)
    return play(row, published_system(row, **ABLATIONS[name]), segment, seed=seed)


def killing(seed: int) -> dict[tuple[int, Moved], float]:
    """Seconds that killing 3 of 6 instances adds to a 14B step, by time and by treatment of their samples."""
    step_s, began_s = _last_step(seed)
    ways: tuple[Moved, ...] = (MIGRATING, *ANEW)
    return {
        (after_s, moved): _last_step(seed, began_s + after_s, moved=moved)[0] - step_s
        for after_s, moved in product(SAVED_BY_MIGRATING, ways)
    }


def _last_step(seed: int, killed_s: float = math.inf, *, moved: Moved = MIGRATING) -> tuple[float, float]:
    """Duration and start of the last step."""
    run = simulate_run(
        published_spec(steps=KILLED_STEP, seed=seed, known_windows=FOUND_WINDOWS_S["14B"]),
        cost_model("14B", FITTED),
        workload(),
        _six(killed_s),
        factories=rlboost_components(GROUP, moved=moved),
    )
    check_killed(run.evictions, killed_s)
    *_, before, last = (line.elapsed_s for line in run.metrics)
    return last - before, before


def check_killed(evictions: int, killed_s: float) -> None:
    """Raises RuntimeError: not three machines were evicted, or some although none was to be killed."""
    if evictions != (KILLED if killed_s < math.inf else 0):
        raise RuntimeError(f"{evictions} machines were evicted, {KILLED} at {killed_s:g} s were to be")


def _six(killed_s: float) -> Iterator[Change]:
    """Six machines from the start, three of which are evicted."""
    yield from (Change(time_s=0.0, place=place, to="up") for place in range(6))
    if killed_s < math.inf:
        yield from (Change(time_s=killed_s, place=place, to="down") for place in range(KILLED))


def migrating_lines(pool: ProcessPoolExecutor) -> Iterator[Line]:
    added = list(pool.map(killing, range(KILLED_RUNS)))
    for (after_s, published), (moved, (what, asked)) in product(SAVED_BY_MIGRATING.items(), ANEW.items()):
        share, error = saved([(one[after_s, MIGRATING], one[after_s, moved]) for one in added])
        line = _compared(f"14B, killed at {after_s} s: {what}", published, share, error)
        yield line if asked else replace(line, asked="", reached=None)


def saved(added: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Share of the added time that migration saves, by means; and its standard error."""
    with_it, without = (fmean(seconds) for seconds in zip(*added, strict=True))
    left = with_it / without
    error = stdev(one - left * other for one, other in added) / without / math.sqrt(len(added))
    return 1 - left, error


def static_lines(pool: ProcessPoolExecutor) -> Iterator[Line]:
    for row, speedups in SPEEDUPS.items():
        counts = range(len(WINDOWS_S[row]) + 1)
        futures = {instances: pool.submit(steady, row, FITTED, instances) for instances in counts}
        found: dict[int, Steady] = {instances: future.result() for instances, future in futures.items()}
        if row == "8B":
            yield Line("8B colocated, tokens/s", COLOCATED_TOKENS_PER_S, found[0].tokens_per_s, "fitted")
        for instances, speedup in speedups.items():
            simulated = found[instances].tokens_per_s / found[0].tokens_per_s
            kind = "fitted" if row == "8B" else "predicted"
            yield Line(f"{row} with {instances}, over colocated", speedup, simulated, kind)
        for instances, window_s in enumerate(WINDOWS_S[row], start=1):
            yield Line(f"{row} with {instances}, seeding window, s", window_s, found[instances].window_s, "predicted")
    few = {instances: pool.submit(steady, "14B", FITTED, instances, setting=SHORT) for instances in (0, 3)}
    speedup = few[3].result().tokens_per_s / few[0].result().tokens_per_s
    yield Line(f"14B with 3, cut at {SHORT.longest:,} tokens, over colocated", SHORT_SPEEDUP, speedup, "predicted")


def dynamic_lines(totals: dict[tuple[str, str], Total]) -> Iterator[Line]:
    for row in ("8B", "14B"):
        alone, found = totals[row, COLOCATED], totals[row, "published"]
        speedup = found.tokens_per_s / alone.tokens_per_s
        reached = abs(speedup / DYNAMIC_SPEEDUP[row] - 1) <= WITHIN
        asked = f"within {WITHIN:.0%}"
        yield Line(f"{row} throughput, over colocated", DYNAMIC_SPEEDUP[row], speedup, "predicted", asked, reached)
        per_usd = found.tokens_per_usd / alone.tokens_per_usd
        yield Line(f"{row} tokens per dollar, over colocated", TOKENS_PER_USD[row], per_usd, "predicted")
    whole = totals["14B", "published"].tokens_per_s
    doubled = steady("14B", FITTED, 0, setting=Setting(machines=2)).tokens_per_s
    yield Line("14B, over colocated on twice the machines", OVER_DOUBLED, whole / doubled, "predicted")
    yield _compared("14B, effect of no seeding", NO_SEEDING, totals["14B", "no seeding"].tokens_per_s / whole - 1)
    yield _compared("14B, effect of memory", MEMORY, whole / totals["14B", "no memory"].tokens_per_s - 1)


def _compared(figure: str, published: float, simulated: float, error: float | None = None) -> Line:
    reached = 1 / FACTOR <= simulated / published <= FACTOR
    return Line(figure, published, simulated, "predicted", f"within a factor {FACTOR:g}", reached, error)


def show(lines: list[Line]) -> None:
    table = Table(title="RLBoost, published and simulated", box=box.SIMPLE)
    for column in ("figure", "published", "simulated", "off", "", "asked"):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for line in lines:
        verdict = f"{line.asked}: {'reached' if line.reached else 'MISSED'}" if line.asked else ""
        off = f"{line.simulated / line.published - 1:+.0%}"
        published, simulated = (
            f"{figure:,.0f}" if abs(figure) >= 5 else f"{figure:.2f}" for figure in (line.published, line.simulated)
        )
        error = "" if line.error is None else f" ± {line.error:.2f}"
        table.add_row(line.figure, published, simulated + error, off, line.kind, verdict)
    Console(width=120).print(table)


def main() -> int:
    parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    totals = {case: total(outcomes) for case, outcomes in play_all(CASES, run_case).items()}
    check_evictions({f"{row} {name}": found for (row, name), found in totals.items()})
    with ProcessPoolExecutor(CORES) as pool:
        lines = [*static_lines(pool), *dynamic_lines(totals), *migrating_lines(pool)]
    show(lines)
    for (row, name), found in totals.items():
        held = f"{found.workers:.2f} instances, {found.evictions} evictions"
        print(f"{row:4} {name:12} {held}, trainer's GPUs idle {found.trainer_idle:.1%}")
    systems = {f"{row} {name}": to_builtins(found) for (row, name), found in totals.items()}
    content = {"fitted": to_builtins(FITTED), "lines": [asdict(line) for line in lines], "systems": systems}
    write_result("published_policy", content)
    return exit_code(content)


if __name__ == "__main__":
    sys.exit(main())
