"""Calls a function with the arguments that its signature names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.core.errors import UserError

KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The arguments that a function takes by name."""

    required: tuple[str, ...]
    optional: tuple[str, ...]  # have a default
    everything: bool  # takes **kwargs

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    def choose(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values to pass. Missing ones keep their defaults."""
        if self.everything:
            return dict(values)
        return {name: values[name] for name in self.names if name in values}


def wanted_arguments(function: Callable[..., Any], *, called: str, where: str) -> Wanted:
    """The arguments of a function.

    Args:
        called: how it is called, for the hint.

    Raises:
        UserError: it has no signature, or an argument that cannot be given by name.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UserError(
            f"{name} has no signature", where=where, hint=f"write a function around it: def {called}"
        ) from None
    required = [each.name for each in parameters if each.kind in KEYWORDS and each.default is each.empty]
    optional = [each.name for each in parameters if each.kind in KEYWORDS and each.default is not each.empty]
    positional = [each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_ONLY]
    if any(each.default is each.empty for each in positional):
        what = f"{name} has arguments without a name: {inspect.signature(function)}"
        raise UserError(what, where=where, hint=f"write a function around it: def {called}")
    everything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return Wanted(required=tuple(required), optional=tuple(optional), everything=everything)


def check_offered(
    wanted: Wanted,
    offered: Collection[str],
    *,
    name: str,
    where: str,
    meant: Mapping[str, str] | None = None,
    cure: str = "",
) -> None:
    """Refuse a function that requires an argument which is not offered.

    Args:
        meant: names that other libraries use, with ours.
        cure: what else would help, for the hint.

    Raises:
        UserError: names the argument, what is offered, and a similar name.
    """
    for missing in wanted.required:
        if missing not in offered:
            close = difflib.get_close_matches(missing, offered, 1, 0.6)
            close = [meant[missing]] if meant and missing in meant else close
            hint = f"did you mean {close[0]}? " if close else ""
            hint += f"it can take: {', '.join(offered)}{cure and f'; {cure}'}"
            raise UserError(f"{name} takes an argument `{missing}`, which does not exist", where=where, hint=hint)
