"""How a user function or class reaches another process: by its import path, or by value (cloudpickle).

By value it is a copy with its closure, its defaults and the globals that it uses. What it would share with this process
(an open file, a lock, a model, a list that it fills) a copy cannot have, so such functions stay in this process.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import importlib
import pickletools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import cloudpickle
import msgspec
import regex

from tidemill.core.errors import UserError, exception_text
from tidemill.core.records import Record
from tidemill.extensions.identity import PLAIN
from tidemill.extensions.loading import import_now, module_spec

AVAILABLE = sys.platform == "linux"
"""Whether there are processes of user code (`fork_server`)."""
FACTORY_MARK = type(dataclasses._HAS_DEFAULT_FACTORY)  # type: ignore[attr-defined]
"""Of the default in `__init__` of a dataclass, in place of a factory's result."""
REPR_MODULES = ("dataclasses", "reprlib")
"""Their functions around the `__repr__` of a dataclass have a set, which each process may have for itself."""
LARGEST_BYTES = 16_000_000
"""Of a function that travels by value."""
CONSTANTS = (
    *PLAIN, range, slice, enum.Enum, PurePath, Decimal, Fraction, date, time, timedelta, tzinfo, re.Pattern,
    regex.Pattern, types.ModuleType, types.BuiltinFunctionType, types.GenericAlias, types.UnionType, FACTORY_MARK,
)  # fmt: skip


class UnportableError(Exception):
    """The message says why the function cannot run in another process."""


class Target(Record):
    """A function or class for another process."""

    name: str
    path: str = ""  # of the import; empty: by value
    pickled: bytes = b""

    def load(self, *, where: str) -> Callable[..., Any]:
        """
        Raises:
            UserError: it cannot be imported.
        """
        if self.path:
            return import_now(self.path, where)
        try:
            function: Callable[..., Any] = cloudpickle.loads(self.pickled)
        except Exception as error:
            what = f"{self.name} cannot be copied to another process: {exception_text(error)}"
            raise UserError(what, where=where, hint="move it to a separate file, and import it from there") from error
        return function


def target_of(function: Callable[..., Any], path: str, *, name: str, copy_shared: bool = False) -> Target:
    """The target of a function or class.

    Args:
        path: its import path; empty if it has none.
        copy_shared: copy it even if it uses what a copy does not share with this process.

    Raises:
        UnportableError: it must stay in this process.
    """
    if not AVAILABLE:
        raise UnportableError("processes that can be stopped need Linux")
    if path:
        return Target(name=name, path=path)
    if not copy_shared and (value := next(_shared(function, set()), "")):
        raise UnportableError(f"it uses {value}, which a copy in another process does not share")
    try:
        pickled = _pickled(function)
    except Exception as error:
        raise UnportableError(f"it cannot be copied: {exception_text(error)}") from error
    if len(pickled) > LARGEST_BYTES:
        raise UnportableError(f"a copy of it has {len(pickled):,} bytes, and {LARGEST_BYTES:,} are the limit")
    return Target(name=name, pickled=pickled)


def _pickled(function: Callable[..., Any]) -> bytes:
    """By value, with the definitions that it uses of modules that an import does not find."""
    by_value: set[str] = set()
    try:
        while True:
            pickled: bytes = cloudpickle.dumps(function)
            texts = {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}
            hidden = {name for name in texts - by_value if name in sys.modules and not _is_found(name)}
            if not hidden:
                return pickled
            for name in hidden:
                cloudpickle.register_pickle_by_value(sys.modules[name])
            by_value |= hidden
    finally:
        for name in by_value:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


def _is_found(module: str) -> bool:
    """Whether another process can import a module, which may have been loaded from a file by other means."""
    return module_spec(module) is not None or getattr(sys.modules[module], "__file__", None) is None


def _shared(value: Any, seen: set[int]) -> Iterator[str]:
    """What a copy of a value does not share with the original: its names and types."""
    if isinstance(value, CONSTANTS) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType) and not _is_importable(value) and (name := _assigned(value)):
        yield f"`{name}`, which it assigns"
    for kind, parts in PARTS.items():
        if isinstance(value, kind):
            for name, part in parts(value):
                yield from _shared_part(name, part, seen)
            return
    dataclass_params = getattr(type(value), "__dataclass_params__", None)
    if isinstance(value, msgspec.Struct) and value.__struct_config__.frozen:
        fields: Iterable[str] = value.__struct_fields__
    elif dataclass_params is not None and dataclass_params.frozen:
        fields = value.__dataclass_fields__
    else:
        yield f"an object of type {type(value).__name__}"
        return
    for name in fields:
        yield from _shared_part(name, getattr(value, name), seen)


def _shared_part(name: str, value: Any, seen: set[int]) -> Iterator[str]:
    for inner in _shared(value, seen):
        yield f"`{name}` ({type(value).__name__})" if inner.startswith("an object") and name else inner


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function by value takes along. Functions that can be imported are imported by the copy."""
    if _is_importable(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield "", function.__defaults__ or ()
    yield "", tuple((function.__kwdefaults__ or {}).values())
    loaded = (each.argval for each in _instructions(function.__code__) if each.opname == "LOAD_GLOBAL")
    for name in dict.fromkeys(loaded):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Of a function and the functions inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _assigned(function: types.FunctionType) -> str:
    """A global or a variable of an enclosing function that the function assigns."""
    for each in _instructions(function.__code__):
        outer = each.opname == "STORE_DEREF" and each.argval in function.__code__.co_freevars
        if outer or each.opname == "STORE_GLOBAL":
            return str(each.argval)
    return ""


def _class_parts(given: type) -> Iterator[tuple[str, Any]]:
    """The methods of a class by value. Its attributes are those of each process, as the instances are."""
    if _is_importable(given):
        return
    for owner in given.__mro__:
        if not _is_importable(owner):
            for name, member in vars(owner).items():
                method = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if isinstance(method, types.FunctionType) and method.__globals__["__name__"] not in REPR_MODULES:
                    yield name, method


def _is_importable(definition: Any) -> bool:
    """Whether cloudpickle copies a reference instead of the definition."""
    if definition.__module__ == "__main__":
        return False
    try:
        found: Any = importlib.import_module(definition.__module__)
        if not _is_found(definition.__module__):
            return False
        for name in definition.__qualname__.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return found is definition


PARTS: dict[type, Callable[[Any], Iterator[tuple[str, Any]]]] = {
    types.FunctionType: _function_parts,
    type: _class_parts,
    types.MethodType: lambda value: iter((("", value.__func__), ("", value.__self__))),
    functools.partial: lambda value: iter((("", value.func), ("", value.args), ("", tuple(value.keywords.items())))),
    tuple: lambda value: (("", each) for each in value),
    frozenset: lambda value: (("", each) for each in value),
    types.MappingProxyType: lambda value: (("", each) for each in value.items()),
}
"""The values that are constant if their parts are."""
