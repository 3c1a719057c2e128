"""Imports a function from a file or a module by its path, with a deadline."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tidemill.core.errors import UserError, exception_text
from tidemill.extensions.calls import CallTimeout, call_blocking

IMPORT_DEADLINE_S = 300.0
"""Long, because a module may load a model on import."""


def import_function(path: str, *, where: str) -> Callable[..., Any]:
    """Import `path/file.py:function` or `package.module:function`.

    Args:
        where: the configuration key that names the function, for errors.

    Raises:
        UserError: it cannot be imported within `IMPORT_DEADLINE_S`, or does not exist.
    """
    try:
        return call_blocking(lambda: import_now(path, where), timeout_s=IMPORT_DEADLINE_S)
    except CallTimeout:
        what = f"importing {path.rpartition(':')[0]} takes longer than {IMPORT_DEADLINE_S:g} s"
        hint = "move slow initialization from the import to the first call"
        raise UserError(what, where=where, hint=hint) from None


def source_file(path: str) -> Path | None:
    """The file that holds the function, found without importing anything, including parent packages; None if the module
    is missing or built in."""
    source, _, _ = path.rpartition(":")
    if source.endswith(".py"):
        return Path(source)
    spec = module_spec(source)
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def module_spec(name: str) -> ModuleSpec | None:
    """How an import would find a module, found without importing anything, including parent packages."""
    folders: list[str] | None = None  # None searches the import path
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        inner = ".".join(parts[:depth])
        try:
            spec = next((found for finder in sys.meta_path if (found := finder.find_spec(inner, folders))), None)
            folders = list(spec.submodule_search_locations or []) if spec else []
        except KeyError:  # a namespace package asks its parent, which is not imported, for its folders
            inside = [Path(folder, parts[depth - 1]) for folder in folders or ()]
            spec, folders = None, [str(folder) for folder in inside if folder.is_dir()]
    return spec


def import_now(path: str, where: str) -> Callable[..., Any]:
    source, _, name = path.rpartition(":")
    try:
        if source.endswith(".py"):
            module = _import_file(Path(source), where)
        else:
            module = importlib.import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        hint = "correct the module"
        if isinstance(error, ModuleNotFoundError) and str(error.name) in source:
            hint = "install the package, or give a file: path/file.py:function"
        raise UserError(f"cannot import {source}: {exception_text(error)}", where=where, hint=hint) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [key for key in vars(module) if callable(getattr(module, key))], n=1)
        hint = f"did you mean {source}:{close[0]}?" if close else f"define {name} in it"
        raise UserError(f"{source} has no function {name}", where=where, hint=hint)
    return function


def _import_file(file: Path, where: str) -> ModuleType:
    if not file.is_file():
        raise UserError(
            f"no file {file}",
            where=where,
            hint=f"it is looked for at {file.absolute()}: paths in a recipe start at the recipe's folder, those on the "
            "command line at the working directory",
        )
    # Functions of one file share a module; a changed file is a new one.
    key = f"{file.resolve()}\0".encode() + file.read_bytes()
    name = f"tidemill_user_{file.stem}_{hashlib.blake2b(key, digest_size=8).hexdigest()}"
    if (known := sys.modules.get(name)) is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
