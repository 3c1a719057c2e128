"""Which results are older than the code that they measured.

    python -m benchmarks.status

A result is *current* if no file that its benchmark imports has changed since its commit. Otherwise the table shows how
many have, and how to measure it again. Of a result whose parts are from several commands it shows the part whose code
has changed most.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import RESULTS
from benchmarks.origin import changed_since, origin_of, origins_in, source_digest


def state_of(path: Path) -> tuple[str, str, str]:
    """(state, date, command) of a result file; of its parts, that with the most changes since."""
    result = json.loads(path.read_text())
    origins = origins_in(result) or [origin_of(path, result)]
    of = max(sorted(origins, key=lambda one: str(one["date"])), key=_changes)
    if "source" in of:  # measured in a copy without a repository
        return "current" if of["source"] == source_digest() else "code has changed since", of["date"], of["command"]
    try:
        changed = len(changed_since(of["commit"], of["module"]))
    except ValueError as error:
        return str(error), of["date"], of["command"]
    words = "file has" if changed == 1 else "files have"
    state = f"{changed} {words} changed since" if changed else "current"
    if of["changed"]:
        state = f"uncommitted when measured: {len(of['changed'])}; {state}"
    return state, of["date"], of["command"]


def _changes(of: Mapping[str, Any]) -> float:
    try:
        return len(of["changed"]) + len(changed_since(of["commit"], of["module"]))
    except ValueError:
        return math.inf


def main() -> int:
    table = Table("result", "measured", "state", "command", box=box.SIMPLE)
    for path in sorted([*RESULTS.glob("*.json"), *RESULTS.glob("gpu/*.json")]):
        state, date, command = state_of(path)
        table.add_row(path.stem, date, state, command)
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
