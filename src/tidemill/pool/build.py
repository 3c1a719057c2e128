"""The provider a `[pool]` section asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from tidemill.config.pool import StaticPool, SyntheticPool, TracePool
from tidemill.core.clock import Clock
from tidemill.core.errors import UserError
from tidemill.core.protocols import Provider
from tidemill.pool.provider import ScheduledProvider
from tidemill.pool.static import static_timetable
from tidemill.pool.synthetic import market_of_pool, market_timetable
from tidemill.pool.timetable import Timetable
from tidemill.pool.trace import trace_timetable
from tidemill.pool.trace_files import read_trace

ScheduledPool: TypeAlias = StaticPool | TracePool | SyntheticPool
"""The pools that a timetable can play; the others come with their runtime."""


def build_provider(
    pool: ScheduledPool,
    *,
    price_usd_per_hour: float,
    clock: Clock,
    session: int,
    read: Callable[[Path], bytes] = Path.read_bytes,
) -> Provider:
    """Its timetable begins now. `session` tells lives of a run apart; `read` returns the bytes of a trace's file.

    Raises:
        UserError: the trace cannot be read, or is over before the run begins.
    """
    return ScheduledProvider(
        timetable_of(pool, read),
        clock=clock,
        session=session,
        price_usd_per_hour=price_usd_per_hour,
        most=pool.max_workers if isinstance(pool, TracePool) else pool.workers,
    )


def timetable_of(pool: ScheduledPool, read: Callable[[Path], bytes]) -> Timetable:
    """Raises what `build_provider` raises."""
    if isinstance(pool, StaticPool):
        return static_timetable(pool.workers)
    if isinstance(pool, SyntheticPool):
        return market_timetable(market_of_pool(pool), seed=pool.seed)
    trace = read_trace(pool.path, read)
    if pool.start_s > 0 and pool.start_s >= trace.end_s:
        what = f"{pool.start_s:g} lies beyond the end of {pool.path}, which is {trace.end_s:g} s long"
        raise UserError(what, where="pool.start_s", cure="begin earlier")
    return trace_timetable(trace, start_s=pool.start_s, speed=pool.speed, notice_s=pool.notice_s, seed=pool.seed)
