"""Recomputes a figure from its formula's text and its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from tidemill.planner.figures import Figure

FUNCTIONS = {"ceil": math.ceil, "max": max, "min": min, "__builtins__": {}}


def check_figures(figures: Iterable[Figure]) -> int:
    """Check that every figure equals its formula; returns their number."""
    checked = 0
    for figure in figures:
        value = eval(figure.formula, dict(FUNCTIONS), dict(figure.inputs))
        assert value == pytest.approx(figure.value, rel=1e-9, abs=1e-12), figure
        assert figure.source
        checked += 1
    return checked
