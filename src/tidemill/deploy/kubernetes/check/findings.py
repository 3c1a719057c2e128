"""What the check reports: a finding names its document, the field, what is wrong and what to do."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tidemill.core.errors import UserError
from tidemill.core.packages import install_command
from tidemill.deploy.documents import Document

Path = tuple[str | int, ...]
"""The keys and indices that lead to a field."""
PLAIN_KEY = re.compile(r"[A-Za-z0-9_$-]+")


@dataclass(frozen=True, slots=True)
class Finding:
    """An error or a warning; `document` is "RayJob/name"."""

    field: str  # spec.rayClusterSpec.workerGroupSpecs[0].minReplicas
    what: str
    hint: str
    warning: bool = False
    document: str = ""

    def __str__(self) -> str:
        return f"{self.document}: {self.field}: {self.what}\n  {self.hint}"


def finding(path: Path, what: str, hint: str, *, warning: bool = False) -> Finding:
    return Finding(dotted(path), what, hint, warning)


def dotted(path: Path) -> str:
    """`spec.containers[0].env`; a key with dots or slashes stands in brackets."""
    text = ""
    for part in path:
        plain = isinstance(part, str) and PLAIN_KEY.fullmatch(part)
        text += (f".{part}" if text else str(part)) if plain else f"[{part}]"
    return text


def at(value: Any, *path: str | int) -> Any:
    """The value at a path, or None if a step is missing."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def get(value: Any, path: str) -> Any:
    """The value at `spec.containers`, or None if a step is missing."""
    return at(value, *path.split("."))


def closest(given: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The name that is most similar to a misspelt one; empty if none is."""
    names = list(names)
    same = [name for name in names if name.lower() == given.lower()]
    longer = [name for name in names if name.startswith(given) and cutoff <= 0.6]
    return next(iter(same or longer or difflib.get_close_matches(given, names, 1, cutoff)), "")


def did_you_mean(given: Any, names: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """A hint with the closest name, or another one."""
    close = closest(str(given), names, cutoff)
    return f"did you mean {close}?" if close else otherwise


def title(document: Document) -> str:
    return f"{document.get('kind', '?')}/{at(document, 'metadata', 'name') or '?'}"


def extra(module: str) -> ModuleType:
    """A module of the extra `deploy`.

    Raises:
        UserError: the extra is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        where = "tidemill deploy check"
        raise UserError("needs the extra deploy", where=where, hint=install_command("deploy")) from None
