"""Synthetic spot markets: random arrivals and evictions."""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import deque
from collections.abc import Sequence

from tidemill.config.pool import SyntheticPool
from tidemill.core.records import Record
from tidemill.pool.provider import Change, Timetable


class Market(Record):
    """Parameters of a market.

    Each present machine is evicted at the rate 1 / `mean_time_to_eviction_s`, each empty place is filled at the rate
    1 / `mean_time_to_return_s`, independent of burst sizes: larger bursts are rarer in proportion. On average
    machines * eviction / (eviction + return) machines are present. Without `waits` the process is memoryless: times to
    eviction (or to its notice) and to return are exponential.
    """

    machines: int  # maximum
    present: int  # at the start
    mean_time_to_eviction_s: float  # per machine; inf: never
    mean_time_to_return_s: float  # per place; inf: never
    bursts: tuple[float, ...] = (1.0,)  # share of evictions of more than 0, 1, 2, ... machines
    arrivals: tuple[float, ...] = (1.0,)  # the same for arrivals
    waits: tuple[float, ...] = ()  # relative times between events to draw from; mean 1
    notice_s: float = 0.0  # between notice and eviction
    noticed: float = 0.0  # share of evictions with notice


def market_of_pool(pool: SyntheticPool) -> Market:
    """All machines are present at the start; burst sizes are geometric."""
    return Market(
        machines=pool.workers,
        present=pool.workers,
        mean_time_to_eviction_s=pool.mean_time_to_eviction_s,
        mean_time_to_return_s=pool.mean_time_to_return_s,
        bursts=tuple(pool.burst**size for size in range(pool.workers)),
        notice_s=pool.notice_s,
        noticed=pool.noticed,
    )


def market_timetable(market: Market, *, seed: int) -> Timetable:
    """Draw evictions and returns one after another (Gillespie's direct method), without end unless both rates are 0."""
    rng, now_s = random.Random(seed), 0.0
    present, away = list(range(market.present)), list(range(market.present, market.machines))
    leaving = deque[tuple[float, int]]()  # (down at, place), by time
    yield from (Change(time_s=0.0, place=place, to="up") for place in present)
    wait = _wait(rng, market)
    while True:
        evictions = _rate(len(present), market.mean_time_to_eviction_s, market.bursts)
        returns = _rate(len(away), market.mean_time_to_return_s, market.arrivals)
        both = evictions + returns
        next_s = now_s + wait / both if both else math.inf
        if leaving and leaving[0][0] <= next_s:  # the rates change: rescale the remaining wait
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
                    yield Change(time_s=now_s, place=place, to="noticed", deadline_s=now_s + market.notice_s)
                else:
                    insort(away, place)
                    yield Change(time_s=now_s, place=place, to="down")
        else:
            for place in _draw(rng, away, market.arrivals):
                insort(present, place)
                yield Change(time_s=now_s, place=place, to="up")


def _wait(rng: random.Random, market: Market) -> float:
    """Time to the next event, relative to its expectation."""
    return rng.choice(market.waits) if market.waits else rng.expovariate(1.0)


def _rate(places: int, mean_s: float, shares: Sequence[float]) -> float:
    """Event rate at which each of `places` is hit every `mean_s` seconds on average, given the burst sizes."""
    return places / (mean_s * sum(shares[:places])) if places else 0.0


def _draw(rng: random.Random, places: list[int], shares: Sequence[float]) -> list[int]:
    """Remove one burst from `places`: its size follows `shares`, its members are uniform."""
    threshold = rng.random()
    size = sum(share > threshold for share in shares[: len(places)])
    drawn = sorted(rng.sample(places, size))
    for place in drawn:
        places.remove(place)
    return drawn
