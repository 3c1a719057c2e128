"""report.html: a run or an evaluation on one self-contained page, at any moment of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidemill.telemetry.jsonl import write_atomically
from tidemill.telemetry.live_state import read_live
from tidemill.telemetry.report.sections import run_page
from tidemill.telemetry.run_data import RunData


def write_report(run_dir: Path) -> Path:
    """Write RUN/report.html from the current files of the run directory, without a lock: the run may be in progress.

    Returns:
        The path of the page.

    Raises:
        UserError: there is no run, it has another format, none of its metrics can be read, or the page cannot be
            written.
    """
    data = RunData.read(run_dir)
    live = read_live(run_dir) if data.outcome == "running" else None
    write_atomically(data.run.report, run_page(data, live=live).encode())
    return data.run.report


@contextmanager
def report_at_the_end(run_dir: Path) -> Iterator[None]:
    """Write the report when the block ends. If the block raises, errors of the report are ignored.

    Raises:
        UserError: as `write_report`, if the block succeeds.
    """
    try:
        yield
    except Exception:
        with suppress(Exception):
            write_report(run_dir)
        raise
    write_report(run_dir)
