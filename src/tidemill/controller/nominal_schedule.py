"""Ranks the groups of a round by lengths alone: the same on any machines, whichever of them vanish.

The samples of a round are scheduled in a fixed order on a fixed number of slots, and take as long as they have tokens.
A group ends when as many of its samples as are needed have ended. With unlimited slots groups are ranked by their
longest sample, as in RollPacker (arXiv 2509.21009).

Tokens that a sample has so far are a lower bound of its length, and longer samples never let others start earlier. The
clock therefore advances to the end of a finished sample if no unfinished one could end before it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping

from tidemill.controller.samples import Sample


class NominalSchedule:
    """Time is counted in tokens of one slot.

    Args:
        slots: samples at once; 0: unlimited.
        samples_per_group: consecutive ordinals of a group.
        needed: ended samples that complete a group; the others then leave their slots.
    """

    def __init__(self, slots: int, *, samples_per_group: int, needed: int) -> None:
        self._free: float = slots or math.inf
        self._size, self._needed = samples_per_group, needed
        self._pending: deque[int] = deque()
        self._running: list[tuple[int, int]] = []  # a heap: (lower bound of its end, ordinal)
        self._starts: dict[int, int] = {}  # by ordinal
        self._ended: dict[int, list[int]] = {}  # ordinals by position, in the order of their ends
        self.clock = 0
        self.waits_for: tuple[int, int] | None = None  # ordinal, and the tokens that it must exceed

    def add(self, ordinals: Iterable[int]) -> None:
        """Append samples to the schedule."""
        self._pending.extend(ordinals)
        self._fill()

    def advance(self, samples: Mapping[int, Sample]) -> int | None:
        """The position of the next group that ends, or None while an unfinished sample could change it."""
        self.waits_for = None
        while self._running:
            bound, ordinal = self._running[0]
            sample, start = samples[ordinal], self._starts[ordinal]
            if (end := start + sample.generated) > bound:
                heapq.heapreplace(self._running, (end, ordinal))
                continue
            if sample.finish is None:
                self.waits_for = ordinal, sample.generated
                return None
            self.clock = end
            heapq.heappop(self._running)
            self._free += 1
            position = ordinal // self._size
            ended = self._ended.setdefault(position, [])
            ended.append(ordinal)
            if complete := len(ended) == self._needed:
                self._leave(position)
            self._fill()
            if complete:
                return position
        return None

    def kept(self, position: int) -> list[int]:
        """Ordinals of the samples that completed a group."""
        return self._ended[position][: self._needed]

    def seen(self, sample: Sample) -> tuple[int, bool]:
        """Tokens of a sample until the clock, and whether its end counted by then."""
        if (start := self._starts.get(sample.ordinal)) is None:
            return 0, False
        # Not whether it is finished: that of a last token may arrive later, for an agent with the environment's answer.
        ended = sample.ordinal in self._ended.get(sample.ordinal // self._size, ())
        return min(sample.generated, self.clock - start), ended

    def _leave(self, position: int) -> None:
        """Remove the samples that a complete group does not need."""
        if self._needed < self._size:
            running = [pair for pair in self._running if pair[1] // self._size != position]
            self._free += len(self._running) - len(running)
            heapq.heapify(running)
            self._running = running
            self._pending = deque(ordinal for ordinal in self._pending if ordinal // self._size != position)

    def _fill(self) -> None:
        while self._free > 0 and self._pending:
            ordinal = self._pending.popleft()
            self._starts[ordinal] = self.clock
            heapq.heappush(self._running, (self.clock, ordinal))
            self._free -= 1
