"""`tidemill pause`, `resume`, `checkpoint` and `stop`: requests to a run; `resume` also starts a run that ended."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tidemill.cli.output import Json, Result
from tidemill.core.errors import UserError
from tidemill.core.folders import similar_path
from tidemill.core.formatting import duration
from tidemill.telemetry.control import HOLD_S, Action, ControlFolder, new_request
from tidemill.telemetry.events import read_events
from tidemill.telemetry.jsonl import SharedLines
from tidemill.telemetry.live_state import read_live
from tidemill.telemetry.run_data import NO_RUN
from tidemill.telemetry.run_dir import RunDirectory, read_json
from tidemill.telemetry.run_state import outcome_of

ANSWER_S, POLL_S = 5.0, 0.1
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
RunDir = Annotated[Path, Parameter(name="RUN_DIR")]


def pause(
    run_dir: RunDir,
    /,
    *,
    hold: Annotated[str, Parameter(name="--hold", help="How long rented machines are kept: 90s, 10m, 2h.")] = "10m",
    json: Json = False,
) -> Result:
    """Pause a run after its current step, with a checkpoint; `tidemill resume` continues it."""
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", hold.strip())
    if parsed is None:
        raise UserError(f"{hold!r} is not a time", where="--hold", hint="write 90s, 10m or 2h")
    return _request(run_dir, "pause", hold_s=float(parsed[1]) * UNITS_S[parsed[2]])


def checkpoint(run_dir: RunDir, /, *, json: Json = False) -> Result:
    """Let a run write a checkpoint after its current step."""
    return _request(run_dir, "checkpoint")


def stop(run_dir: RunDir, /, *, json: Json = False) -> Result:
    """End a run after a checkpoint, as Ctrl-C does; `tidemill resume` continues it."""
    return _request(run_dir, "stop")


def resume(run_dir: RunDir, /, *, json: Json = False) -> Result:
    """Continue a paused run in its process, or start a run or a recipe with stages again, as `tidemill train` does."""
    is_pipeline = (run_dir / "pipeline.json").is_file()
    run = _run_in(run_dir)
    events = read_events(run.events) if run is not None else []
    outcome = outcome_of(events, run.events) if run is not None and events else "killed"
    if outcome in ("running", "unknown"):
        return _request(run_dir, "resume")
    if outcome == "finished" and not is_pipeline:
        return Result(data={"finished": True}, text="the run has finished")
    whole = run_dir.absolute().parent.parent
    if run_dir.absolute().parent.name == "stages" and (whole / "pipeline.json").is_file():
        raise UserError("a stage of a pipeline", where=str(run_dir), hint=f"write `tidemill resume {whole}`")
    from tidemill.cli.train_command import train

    return train(*([f"@{run_dir / 'config.toml'}"] if is_pipeline else []), "--run.dir", str(run_dir))


def _run_in(folder: Path) -> RunDirectory | None:
    """The run in a folder, or the running stage of a pipeline; None if no stage is running.

    Raises:
        UserError: neither is there, or it has another format.
    """
    stages = read_json(folder / "pipeline.json").get("stages")
    if stages is not None:
        folders = [folder / stage["folder"] for stage in stages if stage.get("state") == "running"]
        return RunDirectory(folders[0]) if folders else None
    run = RunDirectory(folder)
    if not run.manifest.is_file():
        raise UserError("no run there", where=str(folder), hint=similar_path(folder) or NO_RUN)
    run.refuse_other_format()
    return run


def _request(run_dir: Path, action: Action, *, hold_s: float = HOLD_S) -> Result:
    """Send a request and wait until the run has taken it.

    Raises:
        UserError: the run does not work, does not answer, or ignores the request.
    """
    run = _run_in(run_dir)
    start = f"`tidemill resume {run_dir}` starts it"
    if run is None:
        raise UserError("no stage of this pipeline is running", where=str(run_dir), hint=start)
    log = SharedLines(run.events)
    events = [line for line in log.new_lines() if line is not None and "event" in line]
    outcome = outcome_of(events, run.events)
    if outcome not in ("running", "unknown"):
        hint = "" if outcome == "finished" else start
        raise UserError(f"the run is not running ({outcome})", where=str(run_dir), hint=hint)
    live = read_live(run.path)
    if live is None or live.session != events[-1].get("session"):
        what = "the run takes no requests: it has just started, or is of another version"
        raise UserError(what, where=str(run_dir), hint="try again, or press Ctrl-C in its terminal")
    request = new_request(action, run_id=live.run_id, session=live.session, by="command line", hold_s=hold_s)
    folder, deadline_s = ControlFolder(run.path), time.monotonic() + ANSWER_S
    folder.write(request)
    file, logged = folder.file(request.request_id), dict[str, Any]()
    while not logged and request.request_id not in live.requests and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        logged = next((line for line in log.new_lines() if line and line.get("request") == request.request_id), {})
        live = read_live(run.path) or live
    if logged.get("outcome") == "ignored":
        raise UserError(f"the run ignored the request: {logged.get('reason')}", where=str(run_dir))
    step, taken = logged.get("step"), not file.exists()
    after = "its current step" if step is None else f"step {step}"  # the step it is in, or that which it evaluates
    if not taken and outcome == "unknown":  # of another machine, or a copy
        file.unlink(missing_ok=True)
        hint = f"if its process is gone, write `tidemill train --run.dir {run_dir}`"
        raise UserError(f"the run did not answer in {duration(ANSWER_S)}", where=str(run_dir), hint=hint)
    texts = {
        "pause": f"pauses after {after}, with a checkpoint; rented machines are kept for {duration(hold_s)}",
        "resume": f"resumes after {after}",
        "checkpoint": f"writes a checkpoint after {after}",
        "stop": "stops, with a checkpoint",
    }
    text = texts[action] if taken else "the run is busy, and takes the request when it looks next"
    return Result(data={"action": action, "request": request.request_id, "step": step, "taken": taken}, text=text)
