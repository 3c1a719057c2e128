"""A reward function by its import path: `package.module:function` or `path/file.py:function`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tidemill.core.errors import UserError, exception_text
from tidemill.envs.text.loop_thread import CallTimeout
from tidemill.envs.text.user_calls import call_blocking

WHERE = "scoring.rewards.function"
IMPORT_DEADLINE_S = 300.0
"""A module may load a model while it is imported."""
SIGNATURE = "function(prompt: str, completion: str, answer: str, metadata: dict) -> float"


def import_function(path: str) -> Callable[..., Any]:
    """The function, checked to take (prompt, completion, answer, metadata) by position.

    Raises:
        UserError: it cannot be imported within `IMPORT_DEADLINE_S`, is not there, or takes something else.
    """
    try:
        return call_blocking(lambda: _import_function(path), timeout_s=IMPORT_DEADLINE_S)
    except CallTimeout:
        what = f"importing {path.rpartition(':')[0]} takes longer than {IMPORT_DEADLINE_S:g} s"
        cure = "do at the first call what the module does at import"
        raise UserError(what, where=WHERE, cure=cure) from None


def _import_function(path: str) -> Callable[..., Any]:
    source, _, name = path.rpartition(":")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        cure = "correct the module"
        if isinstance(error, ModuleNotFoundError) and str(error.name) in source:
            cure = "install the package, or give the file itself: path/file.py:function"
        raise UserError(f"cannot import {source}: {exception_text(error)}", where=WHERE, cure=cure) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [key for key in vars(module) if callable(getattr(module, key))], n=1)
        cure = f"did you mean {source}:{close[0]}?" if close else f"define {name} in it"
        raise UserError(f"{source} has no function {name}", where=WHERE, cure=cure)
    _check_signature(function, path)
    return function


def source_file(path: str) -> Path | None:
    """The file that holds the function, found without importing anything, not even the packages around it; None where
    there is none: the module is missing or built in."""
    source, _, _ = path.rpartition(":")
    if source.endswith(".py"):
        return Path(source)
    folders: list[str] | None = None  # at first, wherever modules are imported from
    spec: ModuleSpec | None = None
    parts = source.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = next((found for finder in sys.meta_path if (found := finder.find_spec(name, folders))), None)
        folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _import_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UserError(f"no file {file}", where=WHERE, cure="paths are relative to the working directory")
    name = f"tidemill_reward_{file.stem}_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_signature(function: Callable[..., Any], path: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return
    try:
        signature.bind("prompt", "completion", "answer", {})
    except TypeError as error:
        raise UserError(f"{path} takes {signature}", where=WHERE, cure=f"it is called as {SIGNATURE}") from error
