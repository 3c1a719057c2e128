"""Synthetic markets: machines that come and go by chance, for ever, as told by a few numbers or like a real trace."""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import msgspec

from tidemill.config.pool import SyntheticPool
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.pool.provider import Change, Timetable, capacity_of
from tidemill.pool.traces import CapacityTrace, statistics


class Market(Record):
    """The law of a market.

    A machine that is there is taken at the rate 1 / `mean_time_to_eviction_s`, a place that is empty is filled at the
    rate 1 / `mean_time_to_return_s`, whatever the sizes of bursts: larger ones are so much rarer. On average machines *
    eviction / (eviction + return) machines are there. Without `waits` nothing has a memory, and times to eviction
    (until the notice, where there is one) and to return are exponential.
    """

    machines: int  # at most
    present: int  # at the beginning
    mean_time_to_eviction_s: float  # of one machine; inf for never
    mean_time_to_return_s: float  # of one place; inf for never
    bursts: tuple[float, ...] = (1.0,)  # share of evictions that take more than 0, 1, 2, ... machines at once
    arrivals: tuple[float, ...] = (1.0,)  # the same of machines that come
    waits: tuple[float, ...] = ()  # times between events to draw from, in units of what is expected; of mean 1
    notice_s: float = 0.0  # before an eviction that gives one
    noticed: float = 0.0  # share of evictions that give notice


def market_of_pool(pool: SyntheticPool) -> Market:
    """All machines are there at the beginning; bursts are geometric."""
    return Market(
        machines=pool.workers,
        present=pool.workers,
        mean_time_to_eviction_s=pool.mean_time_to_eviction_s,
        mean_time_to_return_s=pool.mean_time_to_return_s,
        bursts=tuple(pool.burst**size for size in range(pool.workers)),
        notice_s=pool.notice_s,
        noticed=pool.noticed,
    )


def market_of_trace(trace: CapacityTrace) -> Market:
    """The market with a trace's machines, times to eviction and return, sizes of bursts, and calm and turbulent times.

    What is before its first machine does not count.

    Raises:
        UserError: the trace never has a machine.
    """
    first_s = next((time_s for time_s, count in trace.steps if count), None)
    if first_s is None:
        raise UserError("the capacity trace never has a machine", hint="take another trace")
    seen = trace.since(first_s)
    found = statistics(seen)
    market = Market(
        machines=found.peak,
        present=seen.steps[0][1],
        mean_time_to_eviction_s=found.mean_time_to_eviction_s,
        mean_time_to_return_s=found.mean_time_to_return_s,
        bursts=_shares_above(found.bursts),
        arrivals=_shares_above(found.arrivals),
    )
    return msgspec.structs.replace(market, waits=_waits(seen, market))


def like(trace: CapacityTrace, *, seed: int, duration_s: float | None = None) -> CapacityTrace:
    """Another trace of the same market, by default as long as `trace` is after its first machine.

    Raises:
        UserError: the trace never has a machine.
    """
    market = market_of_trace(trace)
    if duration_s is None:
        duration_s = trace.end_s - next(time_s for time_s, count in trace.steps if count)
    return synthetic_trace(market, seed=seed, duration_s=duration_s)


def synthetic_trace(market: Market, *, seed: int, duration_s: float) -> CapacityTrace:
    return capacity_of(market_timetable(market, seed=seed), duration_s)


def market_timetable(market: Market, *, seed: int) -> Timetable:
    """Evictions and returns drawn one after another (Gillespie's direct method), for ever unless nothing can happen."""
    rng, now_s = random.Random(seed), 0.0
    present, away = list(range(market.present)), list(range(market.present, market.machines))
    leaving = deque[tuple[float, int]]()  # (when it is down, place), in this order
    yield from (Change(time_s=0.0, place=place, to="up") for place in present)
    wait = _wait(rng, market)
    while True:
        evictions, returns = _rates(market, len(present), len(away))
        both = evictions + returns
        next_s = now_s + wait / both if both else math.inf
        if leaving and leaving[0][0] <= next_s:  # the rates change: what is left of the wait passes at the new ones
            wait -= both * (leaving[0][0] - now_s)
            now_s, place = leaving.popleft()
            insort(away, place)
            yield Change(time_s=now_s, place=place, to="down")
            continue
        if not both:
            return
        now_s, wait = next_s, _wait(rng, market)
        if rng.random() * both < evictions:
            for place in _draw(rng, present, market.bursts):
                if market.notice_s > 0 and rng.random() < market.noticed:
                    leaving.append((now_s + market.notice_s, place))
                    yield Change(time_s=now_s, place=place, to="warned", deadline_s=now_s + market.notice_s)
                else:
                    insort(away, place)
                    yield Change(time_s=now_s, place=place, to="down")
        else:
            for place in _draw(rng, away, market.arrivals):
                insort(present, place)
                yield Change(time_s=now_s, place=place, to="up")


def _wait(rng: random.Random, market: Market) -> float:
    """Until the next event, in units of what is expected."""
    return rng.choice(market.waits) if market.waits else rng.expovariate(1.0)


def _waits(trace: CapacityTrace, market: Market) -> tuple[float, ...]:
    """The times between a trace's changes, each in units of what `market` lets expect at that count; of mean 1."""
    waits = [
        (end_s - start_s) * sum(_rates(market, count, market.machines - count))
        for (start_s, count), (end_s, _) in pairwise(trace.steps)
    ]
    return tuple(sorted(wait / fmean(waits) for wait in waits))


def _rates(market: Market, present: int, away: int) -> tuple[float, float]:
    """Evictions and returns per second, single machines and bursts alike."""
    return (
        _rate(present, market.mean_time_to_eviction_s, market.bursts),
        _rate(away, market.mean_time_to_return_s, market.arrivals),
    )


def _rate(places: int, mean_s: float, shares: Sequence[float]) -> float:
    """Of groups among so many places, such that one place is in a group every `mean_s` seconds on average."""
    return places / (mean_s * sum(shares[:places])) if places else 0.0


def _draw(rng: random.Random, places: list[int], shares: Sequence[float]) -> list[int]:
    """Take one group out of `places`: its size by `shares`, as far as there are so many; its members each as likely."""
    luck = rng.random()
    size = sum(share > luck for share in shares[: len(places)])
    drawn = sorted(rng.sample(places, size))
    for place in drawn:
        places.remove(place)
    return drawn


def _shares_above(sizes: Sequence[int]) -> tuple[float, ...]:
    """Of `sizes`, the share that is above 0, 1, 2, ..."""
    return tuple(sum(size > above for size in sizes) / len(sizes) for above in range(max(sizes))) if sizes else (1.0,)
