"""What a user's function returned or raised: its score, and errors that name the function, its place and the need."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tidemill.core.errors import UserError, exception_text
from tidemill.extensions.calls import CallError

CORRECT_IT = "correct the function; if steps are already trained, choose another run directory too"
SHOWN = 60
"""Characters of a value in an error."""
LARGEST = 1e18
"""Largest absolute reward: its square must fit float32, for standard deviations."""
TOO_LARGE = "and no reward may be larger than 1e18"
Score: TypeAlias = tuple[float, dict[str, float]] | None
"""The value and its named components; None if the reward does not apply to the sample."""


def place_of(function: Callable[..., Any]) -> str:
    """`file:line` of a function or class; empty if it has no source."""
    plain = inspect.unwrap(getattr(function, "func", function))  # of functools.partial
    call = inspect.getattr_static(type(plain), "__call__", None)  # of an object that can be called
    code = getattr(plain, "__code__", None) or getattr(call, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def placed(name: str, function: Callable[..., Any]) -> str:
    """`name (file:line)`."""
    place = place_of(function)
    return f"{name} ({place})" if place else name


def shown(value: Any) -> str:
    """A value on one line: its type, its shape if it has one, and as much of it as fits."""
    kind, shape = type(value).__name__, getattr(value, "shape", None)
    if value is None:
        return "None"
    if isinstance(shape, tuple):
        size = f"of shape {list(shape)}" if len(shape) else f"with one number, a scalar: {_text(value)}"
        return f"a {kind} {size}"
    if inspect.iscoroutine(value):
        value.close()  # else Python warns that it was never awaited
        return "a coroutine (the function is async)"
    return f"a {kind}: {_text(value)}"


def _text(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001 (of the user's class)
        text = f"an object whose repr raises {type(error).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def wrong_result(name: str, function: Callable[..., Any], fault: str, *, where: str, expected: str) -> UserError:
    """
    Args:
        name: kind and name of the function: `advantage centred`.
        fault: `returned None`.
        expected: the hint.
    """
    return UserError(f"{placed(name, function)} {fault}", where=where, hint=expected)


def raised(
    name: str, function: Callable[..., Any], error: BaseException, *, where: str, hint: str = CORRECT_IT
) -> UserError:
    """The error of a function that raised, with the line: the last one in its own file, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    file = place_of(function).rpartition(":")[0]
    own = [frame for frame in frames if frame.filename == file] or frames[-1:]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return UserError(f"{name} raised {exception_text(error)}{place}", where=where, hint=hint)


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
