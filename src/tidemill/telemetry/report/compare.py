"""The page that compares runs: a file of `tidemill report`, or a page of `tidemill watch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.core.formatting import decimal, interval
from tidemill.telemetry.comparison import (
    AXES,
    changed_keys,
    check_number,
    comparison_json,
    final_figures,
    labels,
    paired_figures,
)
from tidemill.telemetry.jsonl import write_atomically
from tidemill.telemetry.report.pages import TEMPLATES, render_page
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.statistics import Paired


def write_comparison(paths: Sequence[Path], to: Path) -> Path:
    """Write the comparison of runs, finished or in progress, to a file.

    Raises:
        UserError: too few or too many runs, one of them cannot be read, or the file cannot be written.
    """
    check_number(paths)
    write_atomically(to, compare_page([RunData.read(path) for path in paths]).encode())
    return to


def compare_page(runs: Sequence[RunData], *, live: bool = False) -> str:
    """The page: a file, or a live page of the server."""
    names = labels(runs)
    return render_page(
        TEMPLATES / "compare.html.j2",
        names=names,
        axes=AXES,
        compared=comparison_json(runs),
        inline=not live,
        figures=[(label, *texts) for label, texts in final_figures(runs)],
        pairs=[_pair_row(of, names[run], found) for of, run, found in paired_figures(runs)],
        changed=[(key, *texts) for key, texts in changed_keys(runs)],
    )


def _pair_row(of: str, run: str, found: Paired) -> tuple[Any, ...]:
    difference = found.difference
    numbers = [decimal(value) for value in (found.before, found.after, difference.value)]
    return (of, run, found.n, *numbers, interval(difference.ends), found.better, found.worse, decimal(found.p_value))
