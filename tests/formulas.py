"""Checks that figures are complete."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tidemill.hardware.figures import FUNCTIONS, Figure


def check_figures(figures: Iterable[Figure]) -> int:
    """Check that every formula has its inputs, and every figure a source; returns the number of figures."""
    checked = 0
    for figure in figures:
        names = {node.id for node in ast.walk(ast.parse(figure.formula)) if isinstance(node, ast.Name)}
        assert names - set(FUNCTIONS) <= set(figure.inputs), figure
        assert figure.source
        checked += 1
    return checked
