"""The metrics of a run in columns: about 8 bytes a value, where a dictionary takes ten times that."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from operator import eq
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tidemill.telemetry.metrics import MetricLine

NAN = float("nan")
T = TypeVar("T")


class Rows(Sequence[T]):
    """A sequence that builds its items on access. It equals every sequence of the same items."""

    def item(self, at: int) -> T:
        """The item at a position, counted from 0."""
        raise NotImplementedError

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            return [self.item(row) for row in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        return self.item(at % len(self))

    def __iter__(self) -> Iterator[T]:
        return map(self.item, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class _Column:
    """Values of consecutive rows from `start` on; NaN where a row has none."""

    __slots__ = ("cells", "start")

    def __init__(self, start: int) -> None:
        self.start, self.cells = start, array("d")

    def get(self, row: int) -> float:
        at = row - self.start
        return self.cells[at] if 0 <= at < len(self.cells) else NAN

    def put(self, row: int, value: float) -> None:
        if row < self.start:
            self.cells = array("d", [NAN]) * (self.start - row) + self.cells
            self.start = row
        gap = row + 1 - self.start - len(self.cells)
        if gap > 0:
            self.cells.extend(array("d", [NAN]) * gap)
        self.cells[row - self.start] = value

    def insert(self, row: int) -> None:
        """Make room for a row without a value."""
        if row <= self.start:
            self.start += 1
        elif row < self.start + len(self.cells):
            self.cells.insert(row - self.start, NAN)


class RowValues(Mapping[str, float]):
    """The metrics of one row of a table."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: dict[str, _Column], row: int) -> None:
        self._columns, self._row = columns, row

    def __getitem__(self, name: str) -> float:
        value = self._columns[name].get(self._row)
        if value != value:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name, column in self._columns.items() if column.get(self._row) == column.get(self._row))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class MetricTable(Rows[MetricLine]):
    """One row per step, by step; the last line of a step counts. As a sequence, its lines."""

    def __init__(self, lines: Sequence[MetricLine] = ()) -> None:
        self.steps = array("q")
        self._whole = {name: array("q") for name in ("policy_version", "optimizer_steps", "session")}
        self._digests = list[str]()
        self._elapsed_s = array("d")
        self._columns = dict[str, _Column]()
        for line in lines:
            self.append(line)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """Every metric that a row has."""
        return list(self._columns)

    def item(self, at: int) -> MetricLine:
        whole = self._whole
        return MetricLine(
            step=self.steps[at],
            policy_version=whole["policy_version"][at],
            weights_digest=self._digests[at],
            optimizer_steps=whole["optimizer_steps"][at],
            session=whole["session"][at],
            elapsed_s=self._elapsed_s[at],
            values=RowValues(self._columns, at),
        )

    def append(self, line: MetricLine) -> None:
        """Add a line, or replace that of its step. Lines are usually in order."""
        row = bisect_left(self.steps, line.step) if self.steps and line.step <= self.steps[-1] else len(self)
        if row < len(self) and self.steps[row] == line.step:
            self._delete(row)
        if row < len(self):
            for column in self._columns.values():
                column.insert(row)
        self.steps.insert(row, line.step)
        self._digests.insert(row, line.weights_digest)
        self._elapsed_s.insert(row, line.elapsed_s)
        for name, cells in self._whole.items():
            cells.insert(row, getattr(line, name))
        for name, value in line.values.items():
            column = self._columns.get(name) or self._columns.setdefault(name, _Column(row))
            column.put(row, value)

    def _delete(self, row: int) -> None:
        del self.steps[row], self._digests[row], self._elapsed_s[row]
        for cells in self._whole.values():
            del cells[row]
        for column in self._columns.values():
            if row < column.start:
                column.start -= 1
            else:
                del column.cells[row - column.start : row - column.start + 1]

    def values(self, name: str, *, after_step: int | None = None) -> list[float]:
        """A metric of every row that has it, by step; of later steps than `after_step` only."""
        column = self._columns.get(name)
        if column is None:
            return []
        first = 0 if after_step is None else bisect_left(self.steps, after_step + 1)
        return [value for value in column.cells[max(0, first - column.start) :] if value == value]

    def column(self, name: str) -> NDArray[np.float64]:
        """A metric of every row, NaN where it is absent. float64 [rows]"""
        found = np.full(len(self), NAN)
        if (column := self._columns.get(name)) is not None:
            found[column.start : column.start + len(column.cells)] = column.cells
        return found

    def whole(self, name: str) -> NDArray[np.int64]:
        """`step`, `policy_version`, `optimizer_steps` or `session` of every row. int64 [rows]"""
        return np.array(self.steps if name == "step" else self._whole[name], dtype=np.int64)
