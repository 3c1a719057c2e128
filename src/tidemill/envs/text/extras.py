"""Optional packages: imported only when a task, a reward or a data file needs them."""

from __future__ import annotations

import importlib
from typing import Any

from tidemill.core.errors import UserError


def import_extra(module: str, *, package: str, needed_by: str, extra: str = "tasks") -> Any:
    """The module of an optional package, untyped.

    Args:
        extra: the extra of Tidemill that brings it.

    Raises:
        UserError: with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{needed_by} needs the package {package} ({error})", cure=f'pip install "tidemill[{extra}]"'
        ) from error
