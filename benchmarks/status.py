"""Which results are older than the code that they measured.

    python -m benchmarks.status

A result is *current* if no file that its benchmark imports has changed since its commit. Otherwise the table shows how
many have, and how to measure it again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import RESULTS
from benchmarks.origin import changed_since, committed, writer_of


def state_of(path: Path) -> tuple[str, str, str]:
    """(state, date, command) of a result file."""
    result = json.loads(path.read_text())
    of = result.get("origin") or _older(path, str(result["benchmark"]))
    try:
        changed = len(changed_since(of["commit"], of["module"]))
    except ValueError as error:
        return str(error), of["date"], of["command"]
    if of["changed"]:
        return f"measured with {len(of['changed'])} files changed since its commit", of["date"], of["command"]
    return f"{changed} files have changed since" if changed else "current", of["date"], of["command"]


def _older(path: Path, name: str) -> dict[str, Any]:
    """The same for results of before they named their origin: the commit that wrote the file stands for it."""
    (commit, date), module = committed(path), writer_of(name)
    command = f"python -m {module}" if module else ""
    return {"commit": commit, "date": date, "module": module, "command": command, "changed": []}


def main() -> int:
    table = Table("result", "measured", "state", "command", box=box.SIMPLE)
    for path in sorted(RESULTS.glob("*.json")):
        state, date, command = state_of(path)
        table.add_row(path.stem, date, state, command)
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
