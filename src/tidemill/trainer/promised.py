"""Results that may still be under way in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Promised: TypeAlias = Callable[[], T]
"""Waits for a result that was asked for, and returns it; raises what went wrong on the way."""


def known(value: T) -> Promised[T]:
    """A result that is there already."""
    return lambda: value
