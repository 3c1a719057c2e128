"""Extensions: user functions, how a configuration names them, and where they are found.

A configuration names an extension by `path/file.py:function`, `package.module:function`, the name of an entry point of
an installed package, or `session:NAME` for a function that was passed to `tidemill.train` and cannot be imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from tidemill.core.errors import UserError
from tidemill.extensions.identity import function_identity, path_identity
from tidemill.extensions.loading import import_function, source_file

Kind: TypeAlias = Literal[
    "reward",
    "advantage",
    "loss",
    "loss_term",
    "task",
    "prompt_sampler",
    "callback",
    "environment",
    "control_task",
    "vector_env",
]
SESSION = "session:"
TRAINER_KINDS: tuple[Kind, ...] = ("advantage", "loss", "loss_term")
"""Kinds that the trainer's process calls; the others run in the process that starts the run."""
PATH = re.compile(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*")
"""`package.module:function` or `path/file.py:function`; `session:NAME` has the same form."""
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a decorator stores in a function."""

    kind: Kind
    version: str = ""  # replaces the source in the function's identity
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A user function that is ready to call."""

    ref: str  # its name in the configuration
    kind: Kind
    function: Callable[..., Any]
    identity: str  # 32 hex digits; see `extensions.identity`
    options: Mapping[str, Any]  # of its decorator
    path: str  # import path; empty if another process cannot import it

    @property
    def name(self) -> str:
        return self.ref.rpartition(":")[2]


_session: dict[tuple[Kind, str], Extension] = {}
"""The functions that were given as objects in this process; a later one replaces an earlier one of its name."""


def mark(function: FunctionT, found: Mark) -> FunctionT:
    """Store a decorator's arguments in a function.

    Raises:
        UserError: the object cannot have attributes.
    """
    try:
        function.__tidemill__ = found  # type: ignore[attr-defined]
    except AttributeError:
        what = f"@{found.kind} cannot mark {function!r:.60}"
        raise UserError(what, hint="write a function around it with def") from None
    return function


def mark_of(function: Callable[..., Any], kind: Kind, *, where: str) -> Mark:
    """What the function's decorator stored; defaults without a decorator.

    Raises:
        UserError: it has the decorator of another kind.
    """
    found = getattr(function, "__tidemill__", None)
    if not isinstance(found, Mark):
        return Mark(kind=kind)
    if found.kind != kind:
        name = getattr(function, "__name__", repr(function))
        what = f"{name} is decorated as a {found.kind}, and a {kind} is needed here"
        raise UserError(what, where=where, hint=f"use @tidemill.{kind}, or name another function")
    return found


def resolve(ref: str, kind: Kind, *, where: str) -> Extension:
    """The extension that a configuration names.

    Args:
        where: the key that names it, for errors.

    Raises:
        UserError: it does not exist, cannot be imported, or is of another kind.
    """
    if (given := _session.get((kind, ref))) is not None:
        return given
    if ref.startswith(SESSION):
        raise UserError(
            f"{ref} was defined in the Python session that started the run, and this session does not have it",
            where=where,
            hint=f"resume with tidemill.train and the same {kind}, or name one in a file: path/file.py:function",
        )
    if ":" in ref:
        return _loaded(ref, ref, kind, where)
    points = installed(kind)
    if ref not in points:
        known = f"; installed: {', '.join(points)}" if points else ""
        hint = "name path/file.py:function, package.module:function, or an entry point of an installed package"
        raise UserError(f"there is no {kind} named {ref}{known}", where=where, hint=hint)
    return _loaded(ref, points[ref].value.replace(" ", "").partition("[")[0], kind, where)


def installed(kind: Kind) -> dict[str, EntryPoint]:
    """The entry points of installed packages in the group `tidemill.rewards`, `tidemill.advantages`, ..., by name."""
    group = f"tidemill.{'losses' if kind == 'loss' else kind + 's'}"
    return {point.name: point for point in entry_points(group=group)}


def given_function(function: Any, kind: Kind, *, where: str) -> Extension:
    """The extension of a function object; its reference is an import path if it has one.

    Raises:
        UserError: it is not callable, is of another kind, or has no identity.
    """
    if not callable(function):
        what = f"{function!r:.60} is not a function"
        raise UserError(what, where=where, hint=f"give a function, or a text such as path/file.py:{kind}")
    if isinstance(function, type) and kind != "environment":
        hint = "give a function, or an instance that can be called"
        raise UserError(f"{function.__name__} is a class, not a function", where=where, hint=hint)
    found = mark_of(function, kind, where=where)
    path = import_path(function)
    if path:
        identity = path_identity(path, version=found.version)
    else:
        identity = function_identity(function, where=where, version=found.version)
    inner = getattr(function, "func", function)  # of functools.partial
    name = re.sub(r"\W+", "_", getattr(inner, "__name__", type(inner).__name__)).strip("_") or "function"
    ref = path or SESSION + name
    return Extension(ref=ref, kind=kind, function=function, identity=identity, options=found.options, path=path)


def provide(extensions: Iterable[Extension]) -> None:
    """Make functions that were given as objects available to `resolve` for the rest of this process.

    Raises:
        UserError: two of one kind have one name.
    """
    added: dict[tuple[Kind, str], Extension] = {}
    for each in extensions:
        known = added.setdefault((each.kind, each.ref), each)
        if known.function is not each.function:
            what = f"two different functions are named {each.name}"
            raise UserError(what, where=each.kind, hint="rename one of them")
    _session.update(added)


def session_functions() -> list[Extension]:
    """The given functions of the trainer that another process cannot import; they travel by value."""
    return [each for each in _session.values() if not each.path and each.kind in TRAINER_KINDS]


def _loaded(ref: str, path: str, kind: Kind, where: str) -> Extension:
    function = import_function(path, where=where)
    found = mark_of(function, kind, where=where)
    identity = path_identity(path, version=found.version)
    return Extension(ref=ref, kind=kind, function=function, identity=identity, options=found.options, path=path)


def import_path(function: Callable[..., Any]) -> str:
    """`file.py:name` or `module:name` from which the same function can be imported; empty if there is none.

    `__main__` has none: importing a script again would run it again.
    """
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    module = sys.modules.get(module_name or "")
    if module is None or module_name == "__main__" or getattr(module, name, None) is not function:
        return ""
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file():
        return ""
    path = f"{module_name}:{name}"
    found = source_file(path)
    own = "." not in str(module_name) and "site-packages" not in file
    if own or found is None or not found.samefile(file):  # loaded by other means than an import
        return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else ""
    return path
