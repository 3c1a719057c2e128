"""The identity of a user function: a digest of what decides its results, as far as that can be determined.

An importable function is identified by the whole file that defines it; a function of a notebook or a script by its
source, defaults, closure, and the functions, classes and constants of its own module that it uses. Modules that it
imports are not covered.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from tidemill.core.errors import UserError
from tidemill.extensions.loading import source_file

PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Undetermined(Exception):
    """The message names the value whose content cannot be determined."""


def path_identity(path: str, *, version: str = "") -> str:
    """32 hex digits for an importable function: of its name and the file that defines it, or of `version`."""
    name = path.rpartition(":")[2]
    if version:
        return _digest("version", name, version)
    file = source_file(path)
    if file is None or not file.is_file() or file.suffix != ".py":  # built in or compiled
        return _digest("path", path)
    return _digest("file", name, file.read_bytes())


def function_identity(function: Callable[..., Any], *, where: str, version: str = "") -> str:
    """32 hex digits for a function or class that was defined in this process.

    Raises:
        UserError: its source, or a value that it uses, cannot be determined, and there is no `version`.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if version:
        return _digest("version", name, version)
    try:
        return _digest("source", *(_class_parts(function) if isinstance(function, type) else _parts(function, set())))
    except Undetermined as error:
        raise UserError(
            f"cannot determine whether {name} changes between sessions: {error}",
            where=where,
            hint='give it a version in its decorator, version = "1", and change it whenever the function changes',
        ) from None


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _parts(value: Any, seen: set[int]) -> tuple[Any, ...]:
    """Nested tuples of plain values that stand for a value; equal for equal content.

    Raises:
        Undetermined: no such description exists.
    """
    if isinstance(value, PLAIN):
        return (type(value).__name__, value)
    if id(value) in seen:
        return ("seen", getattr(value, "__qualname__", type(value).__name__))
    if isinstance(value, Mapping):
        inside = seen | {id(value)}
        return (type(value).__name__, *((_parts(key, inside), _parts(each, inside)) for key, each in value.items()))
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_parts(each, seen | {id(value)}) for each in value]
        return (type(value).__name__, *(sorted(parts, key=repr) if isinstance(value, (set, frozenset)) else parts))
    for kind, describe in DESCRIPTIONS.items():
        if isinstance(value, kind):
            return describe(value, seen | {id(value)})
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # a numpy array
        return ("array", str(value.dtype), tuple(value.shape), hashlib.blake2b(value.tobytes()).hexdigest())
    if type(value).__module__ == "builtins" or not hasattr(value, "__dict__"):
        raise Undetermined(f"it uses a value of type {type(value).__name__}")
    return ("object", _source(type(value)), _named(vars(value), seen | {id(value)}))


def _function_parts(function: types.FunctionType, seen: set[int]) -> tuple[Any, ...]:
    closure = {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    own = {
        name: function.__globals__[name]
        for name in _global_names(function.__code__)
        if name in function.__globals__ and _belongs(function.__globals__[name], function.__module__)
    }
    return (
        "function",
        _source(function),
        _parts(function.__defaults__ or (), seen),
        _parts(function.__kwdefaults__ or {}, seen),
        _named(closure, seen),
        _named(own, seen),
    )


def _class_parts(given: type) -> tuple[Any, ...]:
    """The members of a class and of its bases in the same module. (A class of a notebook has no source; its methods
    have.)"""
    parts: list[Any] = ["class"]
    for owner in given.__mro__:
        if owner.__module__ == given.__module__:
            members = {
                name: value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                for name, value in vars(owner).items()
                if isinstance(value, types.FunctionType) or not name.startswith(("__", "_abc_"))
            }
            parts += [owner.__qualname__, *_named(members, {id(owner)})]
    return tuple(parts)


def _named(values: Mapping[str, Any], seen: set[int]) -> tuple[Any, ...]:
    found = []
    for name, value in values.items():
        try:
            found.append((name, _parts(value, seen)))
        except Undetermined:
            raise Undetermined(f"it uses `{name}`, of type {type(value).__name__}") from None
    return tuple(found)


def _global_names(code: types.CodeType) -> list[str]:
    """Names that the function and the functions inside it may read from the module, in a fixed order."""
    nested = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for each in nested for name in _global_names(each))]))


def _belongs(value: Any, module: str) -> bool:
    """Whether a global is a constant, or a function or class that the same module defines."""
    if isinstance(value, (types.FunctionType, type)):
        return value.__module__ == module
    return isinstance(value, (*PLAIN, tuple, frozenset, re.Pattern, Path))


def _source(definition: Any) -> str:
    """Source of a function or a class."""
    try:
        return textwrap.dedent(inspect.getsource(definition))
    except (OSError, TypeError):
        raise Undetermined(f"the source of {definition.__qualname__} is not available") from None


DESCRIPTIONS: dict[type, Callable[[Any, set[int]], tuple[Any, ...]]] = {
    types.FunctionType: _function_parts,
    types.BuiltinFunctionType: lambda value, seen: ("builtin", value.__module__, value.__qualname__),
    types.MethodType: lambda value, seen: ("method", _parts(value.__func__, seen), _parts(value.__self__, seen)),
    types.ModuleType: lambda value, seen: ("module", value.__name__),
    functools.partial: lambda value, seen: (
        "partial",
        *(_parts(each, seen) for each in (value.func, value.args, value.keywords)),
    ),
    re.Pattern: lambda value, seen: ("pattern", value.pattern, value.flags),
    PurePath: lambda value, seen: ("path", str(value)),
    type: lambda value, seen: ("class", _source(value)),
}
"""How `_parts` describes the types that it knows."""
