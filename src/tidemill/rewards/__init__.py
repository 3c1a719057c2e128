"""Rewards: what scores a completion. The public names are those of the Python API, `tidemill.rewards.exact()`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# An import of a module of this package makes the package `tidemill.rewards`, in place of the module with these names.
_PUBLIC = [
    *("exact", "numeric", "math_verify", "regex", "length", "task", "tests"),
    *("random", "model", "http", "function", "Reward"),
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tidemill.api.rewards"), name)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
