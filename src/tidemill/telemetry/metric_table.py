"""The metrics of a run in columns: about 8 bytes a value, where a dictionary takes ten times that."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.telemetry.metrics import MetricLine

NAN = float("nan")
OWN = MetricLine._fields[:-1]
"""Fields of a line beside its metrics."""


class RowValues(Mapping[str, float]):
    """The metrics of one row of a table."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: dict[str, tuple[int, array[float]]], row: int) -> None:
        self._columns, self._row = columns, row

    def __getitem__(self, name: str) -> float:
        start, cells = self._columns[name]
        value = cells[self._row - start] if start <= self._row < start + len(cells) else NAN
        if value != value:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._columns if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class MetricTable(Sequence[MetricLine]):
    """The lines of metrics.jsonl, a row each. Those of a run are in order of their steps; see `in_order`."""

    def __init__(self) -> None:
        self._own = list[tuple[int, int, str, int, int, float]]()
        self._columns: dict[str, tuple[int, array[float]]] = {}
        """The first row that has the metric, and its values from there on, NaN where a row has none."""
        self._ordered = True

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[row] for row in range(*at.indices(len(self)))]
        row: int = range(len(self))[at]  # from the end if negative
        return MetricLine(*self._own[row], RowValues(self._columns, row))

    def append(self, line: MetricLine) -> None:
        row = len(self._own)
        self._ordered &= not self._own or line.step > self._own[-1][0]
        self._own.append(line[:-1])
        for name, value in line.values.items():
            if (column := self._columns.get(name)) is None:
                column = self._columns[name] = row, array("d")
            start, cells = column
            if gap := row - start - len(cells):
                cells.extend(repeat(NAN, gap))
            cells.append(value)

    def in_order(self) -> MetricTable:
        """This table, or if its lines are not in order another one, by step with the last line of each step."""
        if self._ordered:
            return self
        by_step, table = {line.step: line for line in self}, MetricTable()
        for step in sorted(by_step):
            table.append(by_step[step])
        return table

    @property
    def last_step(self) -> int:
        """0 without rows."""
        return self._own[-1][0] if self._own else 0

    @property
    def names(self) -> list[str]:
        """Every metric that a row has."""
        return list(self._columns)

    def values(self, name: str) -> list[float]:
        """A metric of every row that has it."""
        _, cells = self._columns.get(name, (0, array("d")))
        return [value for value in cells if value == value]

    def column(self, name: str) -> NDArray[np.float64]:
        """A metric, or another number of a line such as `step`, of every row; NaN where it is absent. float64 [rows]"""
        if name in OWN:
            at = OWN.index(name)
            return np.array([own[at] for own in self._own], dtype=np.float64)
        start, cells = self._columns.get(name, (0, array("d")))
        return np.concatenate([np.full(start, NAN), cells, np.full(len(self) - start - len(cells), NAN)])
