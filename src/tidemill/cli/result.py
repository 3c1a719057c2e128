"""What a verb hands back: data for `--json`, text for people, and the exit code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import RenderableType


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`text` may be anything rich can draw; plain strings are written as they stand."""

    data: dict[str, Any] = field(default_factory=dict)
    text: RenderableType = ""
    exit_code: int = 0


Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object on standard output.")]
DryRun = Annotated[
    bool, Parameter(name="--dry-run", negative=(), help="Show the configuration and what it amounts to; run nothing.")
]
