"""A trainer's link to its workers: whoever pulls at once shares it, and nobody is faster than the own link."""

from __future__ import annotations

import asyncio
import heapq
import math

from tidemill.core.clock import Clock


class Uplink:
    """All transfers go on at one rate: the smaller of the downlink and an equal part of the uplink.

    Rates in bytes per second; an infinite one takes no time.
    """

    def __init__(self, bytes_per_s: float, downlink_bytes_per_s: float, clock: Clock) -> None:
        self._rate, self._most, self._clock = bytes_per_s, downlink_bytes_per_s, clock
        self._moved = 0.0  # bytes of a transfer that would have gone on all the while
        self._at_s = 0.0  # when that was so
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap: `_moved` at which each is done
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None

    async def carry(self, nbytes: float) -> None:
        """Returns when so many bytes are there."""
        if min(self._rate, self._most) == math.inf:
            return
        self._advance()
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._ends, (self._moved + nbytes, self._serial, done))
        self._serial += 1
        self._await_next()
        try:
            await done
        finally:
            if not done.done() or done.cancelled():  # whoever pulled is gone: the others get its part
                self._advance()
                self._ends = [entry for entry in self._ends if entry[2] is not done]
                heapq.heapify(self._ends)
                self._await_next()

    @property
    def _each(self) -> float:
        """Bytes per second of one transfer."""
        return min(self._most, self._rate / max(len(self._ends), 1))

    def _advance(self) -> None:
        now_s = self._clock.now()
        self._moved += self._each * (now_s - self._at_s)
        self._at_s = now_s

    def _await_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            seconds = max(0.0, (self._ends[0][0] - self._moved) / self._each)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._finish)

    def _finish(self) -> None:
        """The first is done; time is exact here, so that rounding leaves nothing over."""
        self._advance()
        self._moved = max(self._moved, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._moved:
            _, _, done = heapq.heappop(self._ends)
            if not done.done():
                done.set_result(None)
        self._await_next()
