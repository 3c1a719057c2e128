"""The value of a correct seeding window for the published policy, and its dependence on availability.

    python -m benchmarks.simulator.windows [--only unmoved,swings,on_traces] [--traces 12]

- *unmoved*: the step time of 14B with a window that is wrong by some seconds, with a fixed number of instances.
- *swings*: the gain of memory when the number of instances alternates between two values for eight hours.
- *on_traces*: the gain of seeding and memory on the segments of the comparison (`published.py`) and on others drawn by
the same rule (`availability.py`).

Parts that are not run keep their results in results/windows.json.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice, product
from statistics import fmean, stdev
from typing import Any, Literal

from msgspec import to_builtins
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import write_part
from benchmarks.origin import parsed
from benchmarks.simulator.availability import SEGMENTS, fitting_seeds
from benchmarks.simulator.calibration import Steady, steady
from benchmarks.simulator.published import ABLATIONS, run_case
from benchmarks.simulator.published_system import FITTED, FOUND_WINDOWS_S, cost_model, workload
from benchmarks.simulator.segments import CORES, check_evictions, published_system, total
from benchmarks.subjects import check_counts
from tidemill.pool.provider import Change
from tidemill.sim.simulation import simulate_run

ROW = "14B"
INSTANCES, OFF_S = (1, 3, 6), (-100.0, -50.0, 0.0, 50.0, 100.0)
UNMOVED: dict[str, Any] = {"window_gain": 1e9, "window_floor_s": 0.0}
SWINGS, EVERY_S, SWINGING_S, SEEDS = ((2, 4), (3, 6), (1, 6)), (900.0, 1800.0, 3600.0), 28_800.0, 4
"""Numbers of instances, duration of each, total duration, and number of seeds."""
TRACES = 12
PARTS = ("unmoved", "swings", "on_traces")
WHOLE, NO_SEEDING, NO_MEMORY = ABLATIONS
SEEDING_AWAY, MEMORY_ADDS = "seeding left away", "memory added"
"""Signs as published: negative where seeding helps, positive where memory does."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Relative effect on throughput in several runs."""

    what: str
    where: str
    shares: tuple[float, ...]

    @property
    def told(self) -> str:
        error = stdev(self.shares) / math.sqrt(len(self.shares))
        return f"{fmean(self.shares):+.1%} ± {error:.1%}"


def unmoved(instances: int, off_s: float) -> Steady:
    """With a window that stays `off_s` from the one found."""
    return steady(ROW, FITTED, instances, seed_window_s=wrong_window_s(instances, off_s), **UNMOVED)


def wrong_windows(pool: ProcessPoolExecutor) -> dict[int, dict[float, Steady]]:
    """By instances and by how far the window is off."""
    cases = list(product(INSTANCES, OFF_S))
    found = dict(zip(cases, pool.map(unmoved, *zip(*cases, strict=True)), strict=True))
    check_unmoved(found)
    return {instances: {off_s: found[instances, off_s] for off_s in OFF_S} for instances in INSTANCES}


def wrong_window_s(instances: int, off_s: float) -> float:
    return max(FOUND_WINDOWS_S[ROW][instances - 1] + off_s, 0.0)


def check_unmoved(found: Mapping[tuple[int, float], Steady]) -> None:
    """Raises RuntimeError: a window did not stay as wrong as planned."""
    for (instances, off_s), one in found.items():
        if abs(one.window_s - wrong_window_s(instances, off_s)) > 1.0:
            raise RuntimeError(f"{instances} instances: a window off by {off_s:g} s moved to {one.window_s:.0f} s")


def swinging(few: int, many: int, every_s: float, name: str, seed: int) -> float:
    """Tokens per second with alternating numbers of instances."""
    system = published_system(ROW, seed=seed, **ABLATIONS[name])
    run = simulate_run(
        system.spec,
        cost_model(ROW, FITTED),
        workload(),
        swings(few, many, every_s),
        seconds=SWINGING_S,
        most_workers=many,
        factories=system.factories,
    )
    check_counts(f"{few} and {many} instances", evictions=run.evictions)
    return run.throughput_tokens_per_s


def swings(few: int, many: int, every_s: float) -> Iterator[Change]:
    yield from (Change(time_s=0.0, place=place, to="up") for place in range(many))
    for turn in range(1, math.ceil(SWINGING_S / every_s)):
        to: Literal["up", "down"] = "down" if turn % 2 else "up"
        yield from (Change(time_s=turn * every_s, place=place, to=to) for place in range(few, many))


def memory_in_swings(pool: ProcessPoolExecutor) -> Iterator[Effect]:
    cases = [(*swing, *rest) for swing, *rest in product(SWINGS, EVERY_S, (WHOLE, NO_MEMORY), range(SEEDS))]
    found = dict(zip(cases, pool.map(swinging, *zip(*cases, strict=True)), strict=True))
    for (few, many), every_s in product(SWINGS, EVERY_S):
        whole, without = (
            [found[few, many, every_s, name, seed] for seed in range(SEEDS)] for name in (WHOLE, NO_MEMORY)
        )
        yield Effect(MEMORY_ADDS, f"{few} and {many}, every {every_s / 60:.0f} min", over(whole, without))


def on_traces(traces: Sequence[int], pool: ProcessPoolExecutor) -> Iterator[Effect]:
    cases = list(product(traces, ABLATIONS, SEGMENTS))
    futures = {(seed, *rest): pool.submit(run_case, ROW, *rest, seed=seed) for seed, *rest in cases}
    found = {case: future.result() for case, future in futures.items()}
    for seed, name in product(traces, ABLATIONS):
        check_evictions({f"{name}, trace {seed}": total({one: found[seed, name, one] for one in SEGMENTS})})
    for segments in (*SEGMENTS, "".join(SEGMENTS)):
        speeds = {
            name: [total({one: found[seed, name, one] for one in segments}).tokens_per_s for seed in traces]
            for name in ABLATIONS
        }
        yield Effect(SEEDING_AWAY, segments, over(speeds[NO_SEEDING], speeds[WHOLE]))
        yield Effect(MEMORY_ADDS, segments, over(speeds[WHOLE], speeds[NO_MEMORY]))


def over(these: Sequence[float], those: Sequence[float]) -> tuple[float, ...]:
    """Relative differences."""
    return tuple(this / that - 1 for this, that in zip(these, those, strict=True))


def show_windows(steps: Mapping[int, Mapping[float, Steady]]) -> None:
    table = Table(
        title="Seconds of a step by how far the window is off; its window, the trainer's wait", box=box.SIMPLE
    )
    for column in ("instances", *(f"{off_s:+.0f} s" for off_s in OFF_S)):
        table.add_column(column, justify="right")
    for instances, by_off in steps.items():
        right = by_off[0.0].step_s
        table.add_row(str(instances), *(f"{one.step_s:.0f} ({one.step_s / right - 1:+.0%})" for one in by_off.values()))
        table.add_row("", *(f"{one.window_s:.0f}, {one.trainer_wait_s:.0f}" for one in by_off.values()))
    Console(width=120).print(table)


def show_effects(title: str, effects: Sequence[Effect]) -> None:
    table = Table(title=title, box=box.SIMPLE)
    for column in ("", "where", "mean", "least", "most", "first"):
        table.add_column(column, justify="right" if column not in ("", "where") else "left")
    for effect in effects:
        others = (min(effect.shares), max(effect.shares), effect.shares[0])
        table.add_row(effect.what, effect.where, effect.told, *(f"{share:+.1%}" for share in others))
    Console(width=120).print(table)


def unmoved_part(pool: ProcessPoolExecutor) -> dict[str, Any]:
    show_windows(steps := wrong_windows(pool))
    return {"steps": to_builtins(steps)}


def swings_part(pool: ProcessPoolExecutor) -> dict[str, Any]:
    show_effects(f"Throughput, with {SEEDS} seeds", effects := list(memory_in_swings(pool)))
    return {"effects": [asdict(effect) for effect in effects]}


def traces_part(pool: ProcessPoolExecutor, count: int) -> dict[str, Any]:
    traces = list(islice(fitting_seeds(), count))
    show_effects(f"Throughput, on {count} traces", effects := list(on_traces(traces, pool)))
    return {"traces": traces, "effects": [asdict(effect) for effect in effects]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--traces", type=int, default=TRACES, help="how many, the comparison's being the first")
    options = parsed(parser)
    if options.traces < 2:
        parser.error("--traces: at least 2, as their spread is told")
    parts: dict[str, Callable[[ProcessPoolExecutor], dict[str, Any]]] = {
        "unmoved": unmoved_part,
        "swings": swings_part,
        "on_traces": lambda pool: traces_part(pool, options.traces),
    }
    with ProcessPoolExecutor(CORES) as pool:
        for name in options.only.split(","):
            found = parts[name](pool)
            if name != "on_traces" or options.traces == TRACES:  # other numbers of traces are for a trial
                write_part("windows", name, found, parts=PARTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
