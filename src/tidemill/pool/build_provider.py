"""Builds the provider for a `[pool]` section, and its warnings about traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from tidemill.config.pool import PoolConfig, StaticPool, SyntheticPool, TracePool
from tidemill.core.errors import UserError
from tidemill.core.protocols import Clock, Provider
from tidemill.pool.provider import Change, ScheduledProvider, Timetable
from tidemill.pool.synthetic import market_of_pool, market_timetable
from tidemill.pool.traces import CapacityTrace, read_trace, stays


def static_timetable(workers: int) -> Timetable:
    """`workers` machines that never go down."""
    return (Change(time_s=0.0, place=place, to="up") for place in range(workers))


SPARE = 100
"""Machines simulated beyond the leased ones, so that leased ones are evicted about as often as in the trace."""

ORDER = {"down": 0, "up": 1, "noticed": 2}  # of simultaneous changes: never more machines than the trace has


def trace_timetable(
    trace: CapacityTrace,
    *,
    start_s: float = 0.0,
    notice_s: float = 0.0,
    seed: int = 0,
    most: int | None = None,
) -> Timetable:
    """Plays `trace` from `start_s` on.

    With `most`, at most `most + SPARE` machines are simulated: enough to replace each leased machine that goes down.

    A machine gets its notice `notice_s` seconds before the count falls, so the capacity always equals the
    trace's. A machine whose notice would precede its arrival gets it on arrival and is not leased. After the end of
    the trace the last count stays.
    """
    changes = []
    rest = trace.since(start_s)
    for stay in stays(rest if most is None else rest.at_most(most + SPARE), seed=seed):
        changes.append(Change(time_s=stay.start_s, place=stay.place, to="up"))
        if stay.end_s == math.inf:
            continue
        if notice_s:
            noticed_s = max(stay.start_s, stay.end_s - notice_s)
            changes.append(Change(time_s=noticed_s, place=stay.place, to="noticed", deadline_s=stay.end_s))
        changes.append(Change(time_s=stay.end_s, place=stay.place, to="down"))
    return iter(sorted(changes, key=lambda change: (change.time_s, ORDER[change.to], change.place)))


LONG_S = 60.0
"""Time without any machine that is worth a warning."""

ScheduledPool: TypeAlias = StaticPool | TracePool | SyntheticPool
"""The pools with a timetable; other pools are provided by their runtime."""


def build_provider(
    pool: ScheduledPool,
    *,
    price_usd_per_hour: float,
    clock: Clock,
    session: int,
    warn: Callable[[str], None] = lambda text: None,
) -> Provider:
    """A provider whose timetable starts now.

    Args:
        session: number of the process working on the run; part of lease ids.
        warn: called once when the run outlasts the trace.

    Raises:
        UserError: the trace cannot be read, or ends before `pool.start_s`.
    """
    return ScheduledProvider(
        timetable_of(pool),
        clock=clock,
        session=session,
        price_usd_per_hour=price_usd_per_hour,
        most=pool.max_workers if isinstance(pool, TracePool) else pool.workers,
        end_s=_end_s(pool) if isinstance(pool, TracePool) else math.inf,
        at_end=lambda: warn(_trace_ended(pool)) if isinstance(pool, TracePool) else None,
    )


def timetable_of(pool: ScheduledPool) -> Timetable:
    """Raises what `build_provider` raises."""
    if isinstance(pool, StaticPool):
        return static_timetable(pool.workers)
    if isinstance(pool, SyntheticPool):
        return market_timetable(market_of_pool(pool), seed=pool.seed)
    return trace_timetable(
        _trace_of(pool),
        notice_s=pool.notice_s,
        seed=pool.seed,
        most=pool.max_workers,
    )


def trace_remarks(pool: PoolConfig) -> list[str]:
    """The span and mean of a trace, and an initial time without any machine. Empty for other pools.

    Raises:
        UserError: the trace cannot be read, or ends before `pool.start_s`.
    """
    if not isinstance(pool, TracePool):
        return []
    trace = _trace_of(pool)
    mean = trace.machine_seconds() / trace.end_s if trace.end_s else trace.count_at(0.0)
    span = f"{pool.path} spans {_long(trace.end_s)} from second {pool.start_s:g}"
    remarks = [f"{span}: {mean:.3g} machines on average, {trace.peak} at most"]
    first_s = next((at_s for at_s, count in trace.steps if count), None)
    if first_s is None:
        what = f"{pool.path} has no machine after second {pool.start_s:g}"
        remarks.append(f"{what}: the run gets no preemptible worker")
    elif first_s >= LONG_S:
        first = f"the first appears at pool.start_s = {pool.start_s + first_s * pool.speed:.10g}"
        remarks.append(f"no machine for the first {_long(first_s)}; {first}")
    return remarks


def trace_outlasted(pool: PoolConfig, run_s: float) -> list[str]:
    """A warning if a run of `run_s` seconds outlasts its trace; empty otherwise.

    Raises:
        UserError: as `remarks`.
    """
    if not isinstance(pool, TracePool) or run_s <= _end_s(pool):
        return []
    return [f"{_trace_ended(pool)}; the run takes {_long(run_s)}"]


def _end_s(pool: TracePool) -> float:
    """Time of the run at which the trace ends, in seconds."""
    return _trace_of(pool).end_s


def _trace_ended(pool: TracePool) -> str:
    last = _trace_of(pool).steps[-1][1]
    machines = "1 machine" if last == 1 else f"{last} machines"
    end = f"{pool.path} ends {_long(_end_s(pool))} into the run"
    return f"warning: {end} and its last count ({machines}) stays; times in a trace are seconds"


def _long(seconds: float) -> str:
    """`6 h`, `2.5 min`."""
    unit, name = next(
        (unit, name) for unit, name in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= unit or unit == 1
    )
    return f"{seconds / unit:.3g} {name}"


def _trace_of(pool: TracePool) -> CapacityTrace:
    """The trace from `pool.start_s` on, in seconds of the run."""
    trace = read_trace(pool.path)
    if pool.start_s > 0 and pool.start_s >= trace.end_s:
        what = f"{pool.start_s:g} lies beyond the end of {pool.path}, which is {trace.end_s:g} s long"
        raise UserError(what, where="pool.start_s", hint="choose an earlier start")
    return trace.since(pool.start_s).faster(pool.speed)
