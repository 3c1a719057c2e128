"""The provider that a `[pool]` section asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from tidemill.config.pool import PoolConfig, StaticPool, SyntheticPool, TracePool
from tidemill.core.errors import UserError
from tidemill.core.protocols import Clock, Provider
from tidemill.pool.provider import Change, ScheduledProvider, Timetable
from tidemill.pool.synthetic import market_of_pool, market_timetable
from tidemill.pool.traces import CapacityTrace, read_trace, statistics, stays


def static_timetable(workers: int) -> Timetable:
    """`workers` machines, there from the start and for ever."""
    return (Change(time_s=0.0, place=place, to="up") for place in range(workers))


SPARE = 100
"""Machines told apart beyond those that are taken: those taken are then hit as often as in the trace, or nearly."""

ORDER = {"down": 0, "up": 1, "warned": 2}  # at one time, so that there are never more machines than the trace has


def trace_timetable(
    trace: CapacityTrace,
    *,
    start_s: float = 0.0,
    notice_s: float = 0.0,
    seed: int = 0,
    most: int | None = None,
) -> Timetable:
    """Plays `trace` from `start_s` on.

    Of more machines than `most`, whose player takes no more at once, only so many are told apart that one which goes
    finds another in its place.

    A machine is warned `notice_s` seconds (of the player's time) before the count falls, so that the capacity is the
    trace's at every moment. One that would have to be warned before it is there is warned as it comes, and so not
    leased. At the end of the trace its last count stays.
    """
    changes = []
    rest = trace.since(start_s)
    for stay in stays(rest if most is None else rest.at_most(most + SPARE), seed=seed):
        begin_s, end_s = stay.start_s, stay.end_s
        changes.append(Change(time_s=begin_s, place=stay.place, to="up"))
        if end_s == math.inf:
            continue
        if notice_s:
            changes.append(
                Change(time_s=max(begin_s, end_s - notice_s), place=stay.place, to="warned", deadline_s=end_s)
            )
        changes.append(Change(time_s=end_s, place=stay.place, to="down"))
    return iter(sorted(changes, key=lambda change: (change.time_s, ORDER[change.to], change.place)))


LONG_S = 60.0
"""Of the run, without any machine: worth a word."""

ScheduledPool: TypeAlias = StaticPool | TracePool | SyntheticPool
"""The pools that a timetable can play; the others come with their runtime."""


def build_provider(
    pool: ScheduledPool,
    *,
    price_usd_per_hour: float,
    clock: Clock,
    session: int,
    read: Callable[[Path], bytes] = Path.read_bytes,
    warn: Callable[[str], None] = lambda text: None,
) -> Provider:
    """Its timetable begins now. `session` tells lives of a run apart; `read` returns the bytes of a trace's file.

    `warn` is called once when the run outlives the trace.

    Raises:
        UserError: the trace cannot be read, or is over before the run begins.
    """
    return ScheduledProvider(
        timetable_of(pool, read),
        clock=clock,
        session=session,
        price_usd_per_hour=price_usd_per_hour,
        most=pool.max_workers if isinstance(pool, TracePool) else pool.workers,
        end_s=_end_s(pool, read) if isinstance(pool, TracePool) else math.inf,
        at_end=lambda: warn(_over(pool, read)) if isinstance(pool, TracePool) else None,
    )


def timetable_of(pool: ScheduledPool, read: Callable[[Path], bytes]) -> Timetable:
    """Raises what `build_provider` raises."""
    if isinstance(pool, StaticPool):
        return static_timetable(pool.workers)
    if isinstance(pool, SyntheticPool):
        return market_timetable(market_of_pool(pool), seed=pool.seed)
    return trace_timetable(
        _trace_of(pool, read),
        start_s=pool.start_s,
        notice_s=pool.notice_s,
        seed=pool.seed,
        most=pool.max_workers,
    )


def remarks(pool: PoolConfig, read: Callable[[Path], bytes] = Path.read_bytes) -> list[str]:
    """The span and mean of a trace, and a time without any machine at its start. Empty for other pools.

    Raises:
        UserError: the trace cannot be read, or is over before the run begins.
    """
    if not isinstance(pool, TracePool):
        return []
    trace = _trace_of(pool, read).since(pool.start_s)
    counts = statistics(trace)
    span = f"{pool.path} spans {_long(trace.end_s)} from second {pool.start_s:g} on"
    return [f"{span}: {counts.mean:.3g} machines on average, {counts.peak} at most", *_gap(pool, trace)]


def outlived(pool: PoolConfig, run_s: float, read: Callable[[Path], bytes] = Path.read_bytes) -> list[str]:
    """A warning if a run of `run_s` seconds outlives its trace; empty otherwise.

    Raises:
        UserError: as `remarks`.
    """
    if not isinstance(pool, TracePool) or run_s <= _end_s(pool, read):
        return []
    return [f"{_over(pool, read)}; the run takes {_long(run_s)}"]


def _end_s(pool: TracePool, read: Callable[[Path], bytes]) -> float:
    """Seconds of the run after which the trace ends."""
    return _trace_of(pool, read).end_s - pool.start_s


def _over(pool: TracePool, read: Callable[[Path], bytes]) -> str:
    last = _trace_of(pool, read).steps[-1][1]
    machines = "1 machine" if last == 1 else f"{last} machines"
    end = f"{pool.path} ends {_long(_end_s(pool, read))} into the run"
    return f"warning: {end} and its last count, {machines}, stays; times in a trace are seconds"


def _gap(pool: TracePool, trace: CapacityTrace) -> list[str]:
    first_s = next((at_s for at_s, count in trace.steps if count), None)
    if first_s is None:
        return [f"{pool.path} has no machine from second {pool.start_s:g} on: no preemptible worker will come"]
    if first_s < LONG_S:
        return []
    begin = pool.start_s + first_s
    return [f"no machine for the first {_long(first_s)}; pool.start_s = {begin:.10g} is where the first appears"]


def _long(seconds: float) -> str:
    """`6 h`, `2.5 min`."""
    unit, name = next(
        (unit, name) for unit, name in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= unit or unit == 1
    )
    return f"{seconds / unit:.3g} {name}"


def _trace_of(pool: TracePool, read: Callable[[Path], bytes]) -> CapacityTrace:
    trace = read_trace(pool.path, read)
    if pool.start_s > 0 and pool.start_s >= trace.end_s:
        what = f"{pool.start_s:g} lies beyond the end of {pool.path}, which is {trace.end_s:g} s long"
        raise UserError(what, where="pool.start_s", hint="begin earlier")
    return trace
