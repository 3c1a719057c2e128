"""Rows of a check: figures, the limits that they must keep, and a verdict.

A row is written to a file as soon as it is measured, so that those before a deadline are kept. Verdicts: *ok* (every
limit is kept; a row without limits is a measurement), *wrong* (a limit is not), *failed* (an exception), *skipped*
(it cannot be measured here).
"""

from __future__ import annotations

import gc
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


OPTIONAL = ("peft", "ray", "vllm")
"""Packages without which rows are skipped; without any other they fail."""


class Skip(Exception):
    """A row that cannot be measured here; says why."""


class Limit(NamedTuple):
    """A limit of a figure. A figure that is None was not measured on this device and keeps every limit."""

    figure: str
    limit: float
    why: str = ""  # where the limit comes from
    least: bool = False  # the figure must not be below it; else not above


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where and how large a check runs."""

    device_type: str
    tiny: bool

    @cached_property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.device_type)

    def free_memory(self) -> None:
        """Of earlier rows, and count the peak from now on."""
        gc.collect()  # a model may be in a cycle of references
        if self.device_type == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class CheckRows:
    """Measures the rows of one check.

    Args:
        file: one JSON object per line is appended to it.
    """

    def __init__(self, file: Path, settings: Settings) -> None:
        self._file, self.settings = file, settings

    def measure(
        self, row: str, function: Callable[[], Mapping[str, Any]], limits: Sequence[Limit] = ()
    ) -> dict[str, Any]:
        """Add a row: the figures that `function` returns. Its failure does not stop the check."""
        written = "{}"
        try:
            figures = dict(function())
            written = json.dumps(_finite(figures))
            broken = [reason for limit in limits if (reason := _broken(limit, figures))]
            verdict, why = ("wrong", "; ".join(broken)) if broken else ("ok", "")
        except Exception as error:  # noqa: BLE001 -- whatever a kernel or an allocator raises, other rows are measured
            if isinstance(error, Skip) or (isinstance(error, ImportError) and _is_optional(error)):
                verdict, why = "skipped", str(error)
            else:
                traceback.print_exc()
                first = (str(error).splitlines() or [""])[0]
                verdict, why = "failed", f"{type(error).__name__}: {first}"[:300]
        named = [
            {"figure": each.figure, "at_least" if each.least else "at_most": each.limit, "why": each.why}
            for each in limits
        ]
        found = {"row": row, "verdict": verdict, "why": why, "figures": json.loads(written), "limits": named}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        self.settings.free_memory()
        return found


def _is_optional(error: ImportError) -> bool:
    return (error.name or "").partition(".")[0] in OPTIONAL


def _finite(value: Any) -> Any:
    """With "nan" and "inf" as text: JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _broken(limit: Limit, figures: Mapping[str, Any]) -> str:
    """Why a limit is not kept; "" if it is."""
    value = figures[limit.figure]
    if value is None or (value >= limit.limit if limit.least else value <= limit.limit):  # not so for NaN
        return ""
    return f"{limit.figure} is {value:.3g}, at {'least' if limit.least else 'most'} {limit.limit:g} is allowed"
