"""What a reward function may return: a number, a table of named numbers, or None."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from tidemill.core.errors import exception_text
from tidemill.extensions.calls import CallError

LARGEST = 1e18
"""Largest absolute reward: its square must fit float32, for standard deviations."""
TOO_LARGE = "and no reward may be larger than 1e18"
Score: TypeAlias = tuple[float, dict[str, float]] | None
"""The value and its named components; None if the reward does not apply to the sample."""


def score_of(result: Any, weights: Mapping[str, float]) -> Score:
    """The score that a reward function returned: a number, a table of named numbers, or None.

    Args:
        weights: factors of the named numbers; empty for their plain sum.

    Raises:
        CallError: it is something else, or not finite.
    """
    if result is None:
        return None
    if not isinstance(result, Mapping):
        return finite(result), {}
    if not result:
        raise CallError("ValueError: returned an empty table; return None if the reward does not apply")
    parts = {str(name): finite(each, of=f"{name} = ") for name, each in result.items()}
    if weights and (missing := [name for name in parts if name not in weights]):
        raise CallError(f"ValueError: returned {missing[0]!r}, which has no weight (weights: {', '.join(weights)})")
    return math.fsum(weights.get(name, 1.0) * each for name, each in parts.items()), parts


def finite(result: Any, *, of: str = "") -> float:
    """
    Raises:
        CallError: the result is not a finite number within `LARGEST`.
    """
    if isinstance(result, str | bytes) or not hasattr(type(result), "__float__"):
        lists = "; functions of lists are @tm.reward(batch=True)" if isinstance(result, list) else ""
        raise CallError(exception_text(TypeError(f"returned {of}{result!r:.60}, which is not a number{lists}")))
    value = float(result)
    if not math.isfinite(value):
        raise CallError(f"ValueError: returned {of}{value}, which is not finite")
    if abs(value) > LARGEST:
        raise CallError(f"ValueError: returned {of}{value:g}, {TOO_LARGE}")
    return value
