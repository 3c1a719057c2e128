"""What a worker's engine computed while it had samples, told apart by how many it drew from at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

from msgspec.structs import fields

from tidemill.core.records import EngineWork

NAMES = tuple(field.name for field in fields(EngineWork))
_COUNTS: Callable[[EngineWork], tuple[float, ...]] = attrgetter(*NAMES)
_ROUND = 6


class WorkBySize:
    """Sums over a worker's reports: a row for each octave of samples drawn from in a pass, so that what a pass takes
    can be told from what a sample takes."""

    def __init__(self) -> None:
        self._seen = EngineWork()  # an engine counts from when it started
        self._rows: dict[int, tuple[float, ...]] = {}

    def observe(self, work: EngineWork) -> None:
        """The worker's next report."""
        before, self._seen = self._seen, work
        if (passes := work.passes - before.passes) > 0:
            size = math.floor(math.log2(max(1.0, (work.drawn - before.drawn) / passes)))
            row = self._rows.get(size, (0.0,) * len(NAMES))
            self._rows[size] = tuple(
                sum_ + now - then for sum_, now, then in zip(row, _COUNTS(work), _COUNTS(before), strict=True)
            )

    def take(self) -> list[dict[str, float]]:
        """The rows since the last call, sizes rising; keys as of `EngineWork`."""
        rows, self._rows = self._rows, {}
        return [
            {name: round(value, _ROUND) for name, value in zip(NAMES, row, strict=True)}
            for _, row in sorted(rows.items())
        ]
