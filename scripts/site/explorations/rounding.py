"""Short numbers in tables."""

from __future__ import annotations

from collections.abc import Iterable


def digits(value: float, count: int = 5) -> float | int:
    """With `count` significant digits; a whole number without a point."""
    short = float(f"{value:.{count}g}")
    return int(short) if short.is_integer() else short


def row(values: Iterable[float], count: int = 5) -> list[float | int]:
    return [digits(value, count) for value in values]
