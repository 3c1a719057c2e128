"""Numbers that are computed from a written formula and keep its inputs and source.

A formula is arithmetic on the names of its inputs: `+ - * / // **`, `ceil`, `max`, `min` and `positive`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import CodeType
from typing import TypeAlias

from tidemill.core.records import Record

ROUNDING = 1e-9


def positive(value: float) -> float:
    """The value, or 0 if it is at most a rounding error."""
    return value if value > ROUNDING else 0.0


FUNCTIONS = {"ceil": math.ceil, "max": max, "min": min, "positive": positive, "__builtins__": {}}


Formulas: TypeAlias = Mapping[str, tuple[str, str, str]]
"""(unit, formula, source) by the symbol of the value."""


class Figure(Record):
    """One number of a plan."""

    name: str
    value: float
    unit: str
    formula: str
    inputs: dict[str, float]
    source: str


class Derivation:
    """Computes figures and keeps them in the order of their computation."""

    def __init__(self) -> None:
        self._figures: dict[str, Figure] = {}

    def compute(self, name: str, unit: str, *, formula: str, source: str, **inputs: float) -> float:
        """Evaluate a formula and keep the figure; it replaces one of the same name.

        Args:
            source: where the formula and its constants are from.
            inputs: a value for every name in the formula.

        Returns:
            The value.
        """
        value = evaluated(formula, inputs)
        self._figures[name] = Figure(name=name, value=value, unit=unit, formula=formula, inputs=inputs, source=source)
        return value

    def evaluate(self, formulas: Formulas, *, label: str = "{}", **inputs: float) -> dict[str, float]:
        """Compute formulas in order; each may use the inputs and the values of those before it.

        Args:
            label: name of a figure, with its symbol in place of the braces.

        Returns:
            The inputs and values by symbol.
        """
        values = dict(inputs)
        for symbol, (unit, formula, source) in formulas.items():
            names = [name for name in _compiled(formula).co_names if name not in FUNCTIONS]
            used = {name: values[name] for name in names}
            values[symbol] = self.compute(label.format(symbol), unit, formula=formula, source=source, **used)
        return values

    @property
    def figures(self) -> Sequence[Figure]:
        return tuple(self._figures.values())


def solved(formulas: Formulas, inputs: Mapping[str, float]) -> dict[str, float]:
    """As `Derivation.evaluate`, without keeping figures."""
    values = dict(inputs)
    for symbol, (_, formula, _) in formulas.items():
        values[symbol] = evaluated(formula, values)
    return values


def evaluated(formula: str, inputs: Mapping[str, float]) -> float:
    """The value of a formula."""
    value: float = eval(_compiled(formula), FUNCTIONS, inputs)
    return value


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")
