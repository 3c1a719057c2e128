"""report.html: the whole run on one page that needs nothing but a browser. Works at any moment of a run's life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidemill.core.errors import UserError
from tidemill.telemetry.jsonl import write_atomically
from tidemill.telemetry.report.pages import render
from tidemill.telemetry.report.run_data import read_run
from tidemill.telemetry.run_dir import RunDirectory


def write_report(run_dir: Path) -> Path:
    """Write RUN/report.html from what the run directory holds now; no lock is taken, the run may be in progress.

    Returns:
        The path of the page.

    Raises:
        UserError: there is no run in that directory, none of its metrics can be read, or the page cannot be written.
    """
    run = RunDirectory(run_dir)
    if not any(path.exists() for path in (run.config, run.manifest, run.events, run.metrics)):
        hint = "name the directory given to `tidemill train` as --run.dir"
        raise UserError("no run here (no config.toml, no events)", where=str(run_dir), hint=hint)
    write_atomically(run.report, render(read_run(run)).encode())
    return run.report


@contextmanager
def report_at_the_end(run_dir: Path) -> Iterator[None]:
    """Write the page when the block ends, also of a run that fails; what failed is then told even if there can be none.

    Raises:
        UserError: as `write_report`, of a run that did not fail.
    """
    try:
        yield
    except Exception:
        with suppress(Exception):
            write_report(run_dir)
        raise
    write_report(run_dir)
