"""All checks of the simulator in one table.

    python -m benchmarks.simulator [--kept]

Measures every part again, one after another, in about half an hour. With `--kept` the table uses existing result files.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import RESULTS
from benchmarks.simulator import faults, ours, ourselves, planted_defects, published, scale

Result = dict[str, Any]
RUNS = {"inprocess": "character model", "demo": "SmolLM2", "ray": "Ray, with evictions"}
"""Names of the cases of `ourselves`."""


class Row(NamedTuple):
    figure: str
    asked: str
    found: str
    reached: bool | None = None  # None without a target


def _published(result: Result) -> Iterator[Row]:
    for line in result["lines"]:
        if line["asked"]:
            error = f" ± {line['error']:.2f}" if line["error"] is not None else ""
            asked, found = f"{line['published']:.2f}, {line['asked']}", f"{line['simulated']:.2f}{error}"
            yield Row(line["figure"], asked, found, line["reached"])


def _ourselves(result: Result) -> Iterator[Row]:
    for case in result["cases"]:
        for measure, error in case["error"].items():
            figure = f"forecast: {RUNS[case['name']]}, {measure.removesuffix('_s')}"
            asked = f"within {case['allowed'][measure]:.0%}"
            yield Row(figure, asked, f"{error:+.1%}", case["reached"][measure])


def _ours(result: Result) -> Iterator[Row]:
    base, target = result["systems"]["published policy"]["tokens_per_usd"], result["target"]
    yield Row(
        "ours, lag 0: tokens per dollar", f"{target:g}, hoped for", f"{result['gain']:.3f}", result["gain"] >= target
    )
    yield Row("ours, lag 1", "", f"{result['systems']['ours, lag 1']['tokens_per_usd'] / base:.3f}")
    yield Row("bound", "", f"{result['bound']['tokens_per_usd'] / base:.3f}")


def _faults(result: Result) -> Iterator[Row]:
    violations = len(result["violated"])
    yield Row(f"violations in {result['seeds']:,} seeds of faults", "0", str(violations), violations == 0)
    mean, target = result["cpu_s_mean"], result["target_s"]
    yield Row("CPU time of a seed", f"at most {target:g} s", f"{mean:.3f} s", mean <= target)


def _planted_defects(result: Result) -> Iterator[Row]:
    seeds = [defect["seeds"] for defect in result["defects"].values()]
    found = [number for number in seeds if number]
    asked = f"{len(seeds)} within {result['most_seeds']:,} seeds"
    yield Row(
        "planted defects that are found",
        asked,
        f"{len(found)} within {max(found, default=0)}",
        len(found) == len(seeds),
    )


def _scale(result: Result) -> Iterator[Row]:
    asked = f"at most {result['target_s']:g} s"
    yield Row("an hour of 1,000 workers, CPU time", asked, f"{result['cpu_s']:.0f} s", result["reached"])


class Part(NamedTuple):
    measure: Callable[[], int | None]
    result: str  # its file
    read: Callable[[Result], Iterator[Row]]


PARTS = {
    "published": Part(published.main, "published_policy", _published),
    "ourselves": Part(ourselves.main, "simulator_ourselves", _ourselves),
    "ours": Part(ours.main, "ours_against_published", _ours),
    "faults": Part(faults.main, "simulator_faults", _faults),
    "planted_defects": Part(planted_defects.main, "planted_defects", _planted_defects),
    "scale": Part(scale.main, "simulator_scale", _scale),
}


def show(rows: list[Row]) -> None:
    table = Table(title="The simulator and its targets", box=box.SIMPLE)
    for column in ("figure", "asked", "found", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for row in rows:
        table.add_row(*row[:-1], "" if row.reached is None else "reached" if row.reached else "MISSED")
    Console(width=120).print(table)


def rows_of(name: str, *, kept: bool) -> list[Row]:
    """The rows of a part; a part that fails is a miss, and the others continue."""
    part = PARTS[name]
    path, began_s = RESULTS / f"{part.result}.json", time.time()
    try:
        if not kept:
            part.measure()
            if path.stat().st_mtime < began_s:
                raise RuntimeError("it wrote no result")
        return [*part.read(json.loads(path.read_text()))]
    except Exception as error:  # noqa: BLE001 - it is told, and counts
        traceback.print_exc()
        return [Row(name, "a result", repr(error), reached=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", action="store_true", help="measure nothing; show what was measured last")
    kept = parser.parse_args().kept
    rows = [row for name in PARTS for row in rows_of(name, kept=kept)]
    show(rows)
    return 1 if any(row.reached is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
