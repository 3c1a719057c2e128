"""Plans as tables, and the derivation of their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from tidemill.cli.result import Result
from tidemill.planner.figures import Figure
from tidemill.planner.words import quantity


def result(
    data: dict[str, Any], parts: Iterable[RenderableType], figures: Sequence[Figure], *, explain: bool
) -> Result:
    """The plan, with the derivation of its figures where it was asked for."""
    shown = list(parts)
    if explain:
        data = {**data, "explain": [msgspec.to_builtins(figure) for figure in figures]}
        shown += ["", *(escape(line) for figure in figures for line in derivation(figure))]
    return Result(data=data, text=Group(*shown))


def derivation(figure: Figure) -> list[str]:
    """Value, formula, inputs and source, a line each."""
    inputs = ", ".join(f"{name} = {value:g}" for name, value in figure.inputs.items())
    lines = [f"{figure.name} = {quantity(figure.value, figure.unit)}", f"  = {figure.formula}"]
    return [*lines, *([f"  with {inputs}"] if inputs else []), f"  {figure.source}"]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """The first column to the left, the others to the right. Where the terminal is too narrow, cells take more lines:
    nothing is left out."""
    shown = Table(box=None, pad_edge=False, title=escape(title) or None, title_justify="left", title_style="bold")
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    return shown


def plain(*lines: str) -> list[str]:
    """Text that happens to have brackets in it."""
    return [escape(line) for line in lines]


def notes(lines: Iterable[str]) -> list[str]:
    return [escape(f"• {line}") for line in lines]
