"""Numbers that explain themselves: each with its formula, what went in, and where the formula is from.

A formula is arithmetic over the names of its inputs (`+ - * / // ** ceil max min`), so that it can be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.records import Record


class Figure(Record):
    """One number of a plan."""

    name: str
    value: float
    unit: str
    formula: str
    inputs: dict[str, float]
    source: str


class Derivation:
    """The figures of a plan, in the order of their making."""

    def __init__(self) -> None:
        self._figures: dict[str, Figure] = {}

    def note(self, name: str, value: float, unit: str, *, formula: str, source: str, **inputs: float) -> float:
        """Keep the figure, and hand its value back; a figure of the same name is replaced."""
        self._figures[name] = Figure(name=name, value=value, unit=unit, formula=formula, inputs=inputs, source=source)
        return value

    @property
    def figures(self) -> Sequence[Figure]:
        return tuple(self._figures.values())
