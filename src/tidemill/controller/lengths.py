"""How long a completion will be, from how long earlier ones were."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from itertools import accumulate

ENOUGH = 4
"""Completions longer than what a sample has already, from which its end is estimated."""

PER_PROMPT = 16
OVERALL = 1024
PROMPTS = 8192
"""What is remembered: the newest lengths of each prompt and of all, and the prompts last seen."""


class LengthEstimator:
    """Learns from finished samples, of this batch and earlier ones; memory is bounded."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, _Lengths] = OrderedDict()  # the last seen prompt last
        self._all = _Lengths(OVERALL)

    def observe(self, prompt_id: str, length: int) -> None:
        """A sample finished with so many tokens."""
        self._all.add(length)
        lengths = self._prompts.pop(prompt_id, None) or _Lengths(PER_PROMPT)
        lengths.add(length)
        self._prompts[prompt_id] = lengths
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)

    def expected(self, prompt_id: str, limit: int) -> float:
        """Mean length of the prompt's samples; unseen: of all prompts'; nothing seen: half of `limit`."""
        for lengths in (self._prompts.get(prompt_id), self._all):
            if lengths and lengths.count:
                return lengths.mean
        return limit / 2

    def expected_remaining(self, prompt_id: str, have: int, limit: int) -> float:
        """Tokens still to come of a sample that has `have` and did not end there; in [1, limit - have], at least 1.

        The mean of what completions longer than `have` had beyond it: the prompt's own if `ENOUGH` of them are known,
        else all prompts'. Too few: what the expected length leaves; and for a sample that is beyond even that, half of
        what `limit` leaves.
        """
        remaining = self._residual(prompt_id, have)
        if remaining is None:
            expected = self.expected(prompt_id, limit)
            remaining = expected - have if expected > have else (limit - have) / 2
        return max(min(remaining, float(limit - have)), 1.0)

    def _residual(self, prompt_id: str, have: int) -> float | None:
        for lengths in (self._prompts.get(prompt_id), self._all):
            if lengths and lengths.longer_than(have) >= ENOUGH:
                return lengths.mean_beyond(have)
        return None


class _Lengths:
    """The newest so many lengths, sorted; questions cost O(log n) while none is added."""

    def __init__(self, keep: int) -> None:
        self._newest: deque[int] = deque(maxlen=keep)
        self._sorted: list[int] = []
        self._sums: list[int] = []  # _sums[i]: of _sorted[:i]; empty when out of date

    def add(self, length: int) -> None:
        if len(self._newest) == self._newest.maxlen:
            del self._sorted[bisect_right(self._sorted, self._newest[0]) - 1]
        self._newest.append(length)
        insort(self._sorted, length)
        self._sums = []

    @property
    def count(self) -> int:
        return len(self._sorted)

    @property
    def mean(self) -> float:
        return self._sum_from(0) / self.count

    def longer_than(self, have: int) -> int:
        return self.count - bisect_right(self._sorted, have)

    def mean_beyond(self, have: int) -> float:
        """What the lengths above `have` have beyond it, on average; there must be one."""
        first = bisect_right(self._sorted, have)
        return self._sum_from(first) / (self.count - first) - have

    def _sum_from(self, first: int) -> int:
        if not self._sums:
            self._sums = list(accumulate(self._sorted, initial=0))
        return self._sums[-1] - self._sums[first]
