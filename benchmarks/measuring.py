"""Turns measured times into ratios, tables and result files."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import tidemill
from benchmarks.origin import origin, with_origin
from benchmarks.turns import SideResult

RESULTS = Path(__file__).resolve().parent / "results"
BYTES_PER_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Our side and the other in one case. Speed-ups are theirs / ours in seconds for the same work.

    Both sides run one thread on one core, so CPU time is the time of a quiet machine; targets refer to it. Wall time
    includes other processes.
    """

    case: str
    ours_s: float  # median of the turns' wall time
    theirs_s: float
    ours_cpu_s: float  # the same of CPU time
    theirs_cpu_s: float
    speedup: float  # of CPU time: median of the rounds' ratios
    speedup_low: float
    speedup_high: float
    speedup_wall: float
    target: float | None
    details: dict[str, Any]

    @property
    def reached(self) -> bool | None:
        return None if self.target is None else self.speedup >= self.target


def compare(case: str, ours: SideResult, theirs: SideResult, *, target: float | None, **details: object) -> Comparison:
    """Reduce interleaved turns; round i of one side is compared with round i of the other."""
    ratios = [b.cpu_s / a.cpu_s for a, b in zip(ours.turns, theirs.turns, strict=True)]
    wall = [b.wall_s / a.wall_s for a, b in zip(ours.turns, theirs.turns, strict=True)]
    work = ours.turns[0].work
    return Comparison(
        case=case,
        ours_s=statistics.median(turn.wall_s for turn in ours.turns),
        theirs_s=statistics.median(turn.wall_s for turn in theirs.turns),
        ours_cpu_s=statistics.median(turn.cpu_s for turn in ours.turns),
        theirs_cpu_s=statistics.median(turn.cpu_s for turn in theirs.turns),
        speedup=statistics.median(ratios),
        speedup_low=min(ratios),
        speedup_high=max(ratios),
        speedup_wall=statistics.median(wall),
        target=target,
        details={
            "rounds": len(ratios),
            "samples": work.samples,
            "prompt_tokens": work.prompt_tokens,
            "completion_tokens": work.completion_tokens,
            "ours_peak_rss_bytes": ours.peak_rss_bytes,
            "theirs_peak_rss_bytes": theirs.peak_rss_bytes,
            **details,
        },
    )


def machine() -> dict[str, Any]:
    """The machine of the measurement."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    packages = {name: _version(name) for name in ("torch", "transformers", "tidemill")}
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        **packages,
    }


def _version(package: str) -> str | None:
    """Of the metadata; a checkout that is on the path without being installed has its own. None: not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return tidemill.__version__ if package == "tidemill" else None


def report(
    name: str, comparisons: Sequence[Comparison], *, theirs: str, notes: Mapping[str, Any] | None = None
) -> bool:
    """Print the table on standard output and write results/NAME.json. Returns whether no target was missed.

    Raises:
        RuntimeError: no case was measured.
    """
    if not comparisons:
        raise RuntimeError(f"{name}: no case was measured; check --only")
    table = Table(title=f"{name}: Tidemill against {theirs}, one thread, interleaved on one core", box=box.SIMPLE)
    for column in ("case", "ours, CPU s", f"{theirs}, CPU s", "times faster", "range", "by wall time", "target"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for item in comparisons:
        verdict = "" if item.reached is None else f"{item.target:g}x {'reached' if item.reached else 'MISSED'}"
        spread = f"{item.speedup_low:.2f}-{item.speedup_high:.2f}"
        seconds = (f"{item.ours_cpu_s:.2f}", f"{item.theirs_cpu_s:.2f}")
        figures = (*seconds, f"{item.speedup:.2f}x", spread, f"{item.speedup_wall:.2f}x")
        table.add_row(item.case, *figures, verdict)
    Console(width=140).print(table)
    cases = [{**vars(item), "reached": item.reached} for item in comparisons]
    write_result(name, {"theirs": theirs, "cases": cases, **(notes or {})})
    return not exit_code(cases)


def write_result(name: str, content: Mapping[str, Any]) -> Path:
    """Write results/NAME.json with figures, machine, and where they come from."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(
        json.dumps({"benchmark": name, "machine": machine(), "origin": origin(), **content}, indent=2) + "\n"
    )
    print(f"written: {path}")
    return path


def exit_code(content: Any) -> int:
    """1 if an aim was missed: if some value under "reached", or under a name that ends in "_reached", is false."""
    if isinstance(content, Mapping):
        verdicts = [value for name, value in content.items() if name == "reached" or str(name).endswith("_reached")]
        return int(any(_has_false(each) for each in verdicts) or any(exit_code(each) for each in content.values()))
    return int(isinstance(content, list | tuple) and any(exit_code(each) for each in content))


def _has_false(verdict: Any) -> bool:
    values = verdict.values() if isinstance(verdict, Mapping) else verdict if isinstance(verdict, list) else [verdict]
    return any(value is False for value in values)


def write_part(name: str, part: str, figures: Mapping[str, Any], *, parts: Sequence[str]) -> None:
    """Replace one part of results/NAME.json; the others stay, each with its machine and origin."""
    new = {"measured_on": machine(), "origin": origin(), **figures}
    write_result(name, earlier_parts(name, parts) | {part: new})


def earlier_parts(name: str, parts: Sequence[str]) -> dict[str, Any]:
    """Those parts that results/NAME.json has, with their origins."""
    path = RESULTS / f"{name}.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {part: with_origin(found[part], path, found) for part in parts if part in found}


def print_records(title: str, records: Sequence[dict[str, Any]]) -> None:
    """One column per record, one row per name."""
    table = Table(title=title, box=box.SIMPLE, show_header=False)
    for name in records[0]:
        cells = (f"{value:.3g}" if isinstance(value := record[name], float) else str(value) for record in records)
        table.add_row(name.replace("_", " "), *cells)
    Console(width=180).print(table)
