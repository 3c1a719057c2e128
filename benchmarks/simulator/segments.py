"""Runs a system on the three segments of availability, two at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.simulator.availability import MOST, SEED, SEGMENT_S, SEGMENTS, timetables
from benchmarks.simulator.published_system import FITTED, FOUND_WINDOWS_S, GROUP, cost_model, published_spec, workload
from benchmarks.subjects import check_counts
from tidemill.config.schema import RunSpec
from tidemill.core.records import Record
from tidemill.pool.provider import Timetable
from tidemill.sim.baselines import Moved, rlboost_components
from tidemill.sim.simulation import ComponentFactories, simulate_run

ENDLESS = 10_000
"""Step limit beyond the end of a segment."""
CORES = 2


class System(Record):
    """How a row is run."""

    spec: RunSpec
    factories: ComponentFactories
    delta_share: float = 0.0  # see `published_system.cost_model`


class Outcome(Record):
    """Figures of one segment, up to the end of its last step."""

    steps: int
    tokens: int
    seconds: float
    usd: float
    train_s: float
    trainer_idle: float  # share of time in which the reserved GPUs neither trained nor generated
    workers_idle: float  # share of the instances' time
    workers: float  # mean number held
    evictions: int
    recomputed: int


def published_system(row: str, *, moved: Moved = "unfinished", seed: int = 0, **fleet: Any) -> System:
    """The published policy with windows of earlier runs, as in its public code; `fleet`: ablations."""
    return System(
        spec=published_spec(steps=ENDLESS, seed=seed, known_windows=FOUND_WINDOWS_S[row], **fleet),
        factories=rlboost_components(GROUP, moved=moved),
    )


def play(row: str, system: System, segment: str | None, *, seed: int = SEED) -> Outcome:
    """Simulate one segment.

    Args:
        segment: by name; None: no instances.
        seed: of the market.
    """
    timetable: Timetable | None = timetables(seed)[segment] if segment else None
    run = simulate_run(
        system.spec,
        cost_model(row, FITTED, delta_share=system.delta_share),
        workload(),
        timetable,
        seconds=SEGMENT_S,
        most_workers=MOST[row],
        factories=system.factories,
    )
    return Outcome(
        steps=len(run.metrics),
        tokens=run.tokens_trained,
        seconds=run.seconds,
        usd=run.cost_usd,
        train_s=run.total("time_train_s"),
        trainer_idle=run.trainer_idle_share,
        workers_idle=run.worker_idle_share or 0.0,
        workers=run.workers_mean,
        evictions=run.evictions,
        recomputed=run.tokens_recomputed,
    )


class Total(Record):
    """Over all segments."""

    tokens_per_s: float
    tokens_per_usd: float
    workers: float
    trainer_idle: float
    workers_idle: float
    evictions: int
    recomputed_share: float  # of the trained tokens
    by_segment: dict[str, float]  # tokens per second


def total(outcomes: Mapping[str, Outcome]) -> Total:
    all_of = list(outcomes.values())
    tokens, seconds = sum(one.tokens for one in all_of), sum(one.seconds for one in all_of)
    held = sum(one.workers * one.seconds for one in all_of)
    return Total(
        tokens_per_s=tokens / seconds,
        tokens_per_usd=tokens / sum(one.usd for one in all_of),
        workers=held / seconds,
        trainer_idle=sum(one.trainer_idle * one.seconds for one in all_of) / seconds,
        workers_idle=sum(one.workers_idle * one.workers * one.seconds for one in all_of) / held if held else 0.0,
        evictions=sum(one.evictions for one in all_of),
        recomputed_share=sum(one.recomputed for one in all_of) / tokens,
        by_segment={name: one.tokens / one.seconds for name, one in outcomes.items()},
    )


def check_evictions(totals: Mapping[str, Total]) -> None:
    """Raises RuntimeError: a system with preemptible instances lost none."""
    for name, found in totals.items():
        if COLOCATED not in name:
            check_counts(name, instances=found.workers, evictions=found.evictions)


def play_all(
    cases: Iterable[tuple[str, str]], run: Callable[[str, str, str | None], Outcome]
) -> dict[tuple[str, str], dict[str, Outcome]]:
    """Outcomes by (row, name of the system) and segment; `run` makes one of them, and must be a module's function."""
    wanted = [(*case, segment) for case in cases for segment in (SEGMENTS if case[1] != COLOCATED else (None,))]
    with ProcessPoolExecutor(CORES) as pool:
        futures = [pool.submit(run, *each) for each in wanted]
        found: dict[tuple[str, str], dict[str, Outcome]] = {}
        for (row, name, segment), future in zip(wanted, futures, strict=True):
            found.setdefault((row, name), {})[segment or COLOCATED] = future.result()
    return found


COLOCATED = "colocated"
