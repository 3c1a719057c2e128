"""What a right seeding window is worth to the published policy, and what of it depends on which machines were there.

    python -m benchmarks.simulator.windows [--traces 12]

First, how much longer a 14B step is when the window is wrong by so many seconds, with a fixed number of instances. Then
what memory brings where their number swings to and fro, for eight hours. Then what seeding and memory bring on the
segments of the comparison (`published.py`) and on others that the same rule draws (`availability.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice, product
from statistics import fmean, stdev
from typing import Literal

from msgspec import to_builtins
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import write_result
from benchmarks.simulator.availability import SEGMENTS, fitting_seeds
from benchmarks.simulator.calibration import Steady, steady
from benchmarks.simulator.published import ABLATIONS, run_case
from benchmarks.simulator.published_system import FITTED, FOUND_WINDOWS_S, plant, workload
from benchmarks.simulator.segments import CORES, Outcome, published_system, total
from tidemill.pool.timetable import Change
from tidemill.sim.run import simulate_run

ROW = "14B"
INSTANCES, OFF_S = (1, 3, 6), (-100.0, -50.0, 0.0, 50.0, 100.0)
TRACES = 12
SWINGS, EVERY_S, SWINGING_S = ((2, 4), (3, 6), (1, 6)), (900.0, 1800.0, 3600.0), 28_800.0
UNMOVED = {"window_gain": 1e9, "window_floor_s": 0.0}
WHOLE, *WITHOUT = ABLATIONS
NO_MEMORY = "no memory"
ALL = "".join(SEGMENTS)


@dataclass(frozen=True, slots=True)
class Effect:
    """On throughput, of leaving something away, on the same machines; as a share."""

    without: str
    segments: str
    by_trace: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.by_trace)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return stdev(self.by_trace) / math.sqrt(len(self.by_trace))


def unmoved(instances: int, off_s: float) -> Steady:
    """With a window that stays so many seconds off from the one that is found."""
    window_s = max(FOUND_WINDOWS_S[ROW][instances - 1] + off_s, 0.0)
    return steady(ROW, FITTED[ROW], instances, seed_window_s=window_s, **UNMOVED)


def wrong_windows(pool: ProcessPoolExecutor) -> dict[int, dict[float, Steady]]:
    """By instances and by how far the window is off."""
    cases = list(product(INSTANCES, OFF_S))
    found = dict(zip(cases, pool.map(unmoved, *zip(*cases, strict=True)), strict=True))
    return {instances: {off_s: found[instances, off_s] for off_s in OFF_S} for instances in INSTANCES}


def swinging(few: int, many: int, every_s: float, without: str) -> float:
    """Tokens per second with many instances and few by turns."""
    system, fitted = published_system(ROW, **ABLATIONS[without]), FITTED[ROW]
    run = simulate_run(
        system.spec,
        plant(ROW, fitted),
        workload(fitted),
        _swings(few, many, every_s),
        seconds=SWINGING_S,
        most_workers=many,
        twins=system.twins,
    )
    return run.throughput_tokens_per_s


def _swings(few: int, many: int, every_s: float) -> Iterator[Change]:
    yield from (Change(time_s=0.0, place=place, to="up") for place in range(many))
    for turn in range(1, math.ceil(SWINGING_S / every_s)):
        to: Literal["up", "down"] = "down" if turn % 2 else "up"
        yield from (Change(time_s=turn * every_s, place=place, to=to) for place in range(few, many))


def memory_in_swings(pool: ProcessPoolExecutor) -> dict[str, dict[float, float]]:
    """What memory adds to throughput, as a share, by numbers of instances and by how long each of them lasts."""
    cases = [
        (few, many, every_s, name) for (few, many), every_s in product(SWINGS, EVERY_S) for name in (WHOLE, NO_MEMORY)
    ]
    found = dict(zip(cases, pool.map(swinging, *zip(*cases, strict=True)), strict=True))
    return {
        f"{few} and {many}": {
            every_s: found[few, many, every_s, WHOLE] / found[few, many, every_s, NO_MEMORY] - 1 for every_s in EVERY_S
        }
        for few, many in SWINGS
    }


def effects(traces: Sequence[int], pool: ProcessPoolExecutor) -> Iterator[Effect]:
    cases = list(product(traces, ABLATIONS, SEGMENTS))
    futures = {
        (seed, name, segment): pool.submit(run_case, ROW, name, segment, seed=seed) for seed, name, segment in cases
    }
    found = {case: future.result() for case, future in futures.items()}
    for without, segments in product(WITHOUT, (*SEGMENTS, ALL)):
        yield Effect(without, segments, tuple(_effect(found, seed, without, segments) for seed in traces))


def _effect(found: Mapping[tuple[int, str, str], Outcome], seed: int, without: str, segments: str) -> float:
    whole, other = (
        total({segment: found[seed, name, segment] for segment in segments}).tokens_per_s for name in (WHOLE, without)
    )
    return other / whole - 1


def show_windows(steps: Mapping[int, Mapping[float, Steady]]) -> None:
    table = Table(title="Seconds of a step, and of the trainer's wait, by how far the window is off", box=box.SIMPLE)
    for column in ("instances", *(f"{off_s:+.0f} s" for off_s in OFF_S)):
        table.add_column(column, justify="right")
    for instances, by_off in steps.items():
        least = by_off[0.0].step_s
        table.add_row(str(instances), *(f"{one.step_s:.0f} ({one.step_s / least - 1:+.0%})" for one in by_off.values()))
        table.add_row("", *(f"{one.trainer_wait_s:.0f}" for one in by_off.values()))
    Console(width=120).print(table)


def show_swings(swings: Mapping[str, Mapping[float, float]]) -> None:
    table = Table(title="What memory adds where the number of instances swings", box=box.SIMPLE)
    for column in ("instances", *(f"every {every_s / 60:.0f} min" for every_s in EVERY_S)):
        table.add_column(column, justify="right")
    for swing, by_time in swings.items():
        table.add_row(swing, *(f"{share:+.1%}" for share in by_time.values()))
    Console(width=120).print(table)


def show_effects(found: Sequence[Effect]) -> None:
    table = Table(title="Effect on throughput", box=box.SIMPLE)
    for column in ("", "segments", "mean", "least", "most", "of the comparison"):
        table.add_column(column, justify="left" if not column else "right")
    for effect in found:
        figures = (min(effect.by_trace), max(effect.by_trace), effect.by_trace[0])
        told = (f"{figure:+.1%}" for figure in figures)
        table.add_row(effect.without, effect.segments, f"{effect.mean:+.1%} ± {effect.error:.1%}", *told)
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=TRACES, help="how many, the comparison's being the first")
    wanted = parser.parse_args().traces
    if wanted < 2:
        parser.error("--traces: at least 2, as their spread is told")
    traces = list(islice(fitting_seeds(), wanted))
    with ProcessPoolExecutor(CORES) as pool:
        show_windows(steps := wrong_windows(pool))
        show_swings(swings := memory_in_swings(pool))
        show_effects(found := list(effects(traces, pool)))
    if wanted == TRACES:
        effects_of = [asdict(effect) for effect in found]
        figures = {"unmoved": to_builtins(steps), "swings": swings, "traces": traces, "effects": effects_of}
        write_result("windows", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
