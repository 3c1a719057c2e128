"""Errors about what a user's function returned or raised: they name the function, its place, the value and the need."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from tidemill.core.errors import UserError, exception_text

CORRECT_IT = "correct the function; if steps are already trained, choose another run directory too"
SHOWN = 60
"""Characters of a value in an error."""


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
