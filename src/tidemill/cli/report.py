"""`tidemill report`: report.html of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tidemill.cli.result import Json, Result


def report(run_dir: Annotated[Path, Parameter(name="RUN_DIR")], /, *, json: Json = False) -> Result:
    """Write report.html of a run: curves, histograms and samples on one page. The run may be in progress.

    Parameters
    ----------
    run_dir
        The directory given to `tidemill train` as --run.dir.
    """
    from tidemill.pipeline.folder import PipelineFolder
    from tidemill.pipeline.page import write_page
    from tidemill.telemetry.report import write_report
    from tidemill.telemetry.report.story import left_out
    from tidemill.telemetry.run_dir import RunDirectory

    pipeline = PipelineFolder(run_dir)
    path = write_page(pipeline) if pipeline.state.is_file() else write_report(run_dir)
    notes = left_out(RunDirectory(run_dir))
    text = "\n".join([str(path), *(f"• {note}, and left out" for note in notes)])
    return Result(data={"report": str(path), "notes": notes}, text=text)
