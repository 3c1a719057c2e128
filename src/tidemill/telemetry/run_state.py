"""What a run is doing: its state in one word and one sentence, from its events, live.json and its process.

The lock file is never touched: a reader that takes it would stop the run from starting. Clocks of other machines are
not compared with ours: what matters is whether the files have changed since the reader looked last.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tidemill.core.errors import GuardStop
from tidemill.core.formatting import duration
from tidemill.core.records import Record
from tidemill.telemetry.events import SESSION_END, SESSION_START, WAITING
from tidemill.telemetry.followed_file import signature
from tidemill.telemetry.live_state import LiveState

StateName: TypeAlias = Literal[
    "running", "paused", "stalled", "killed", "finished", "failed", "interrupted", "guard", "waiting", "unknown"
]
LIVELY: frozenset[StateName] = frozenset({"running", "paused", "stalled", "waiting", "unknown"})
"""States in which the files may still change."""
STALLED_S, STALLED_STEPS = 60.0, 5.0
"""A run is stalled if nothing changed for this time and for this many usual steps."""
LOADING_S = 3600.0
"""The same for a session that has logged nothing yet: it downloads and loads models, and cannot write meanwhile."""
TEXTS: dict[str, str] = {
    "running": "The run is in progress.",
    "paused": "The run is paused.",
    "stalled": "The run is in progress and stalls.",
    "waiting": "The run is in progress.",
    "guard": "The guard ended the run:",
    "finished": "The run is finished.",
    "interrupted": "The run was interrupted; the same command resumes it.",
    "failed": "The run ended with an error; the same command resumes it.",
    "killed": "The run was killed; the same command resumes it.",
    "unknown": "No end was recorded: the run is in progress elsewhere, or was killed.",
}


RESUMABLE: tuple[StateName, ...] = ("interrupted", "failed", "killed")


class RunState(Record):
    """The state of a run."""

    name: StateName
    text: str  # one sentence


def outcome_of(events: Sequence[Mapping[str, Any]], log: Path) -> str:
    """How the newest session ended. Without a `session_end`, whether its process is alive on this machine.

    Args:
        log: events.jsonl. The inode of a copy is not that of the log which the process writes.
    """
    newest = _newest(events, SESSION_START, SESSION_END)
    if newest is None:
        return "unknown"
    if newest["event"] == SESSION_END:
        return str(newest.get("outcome", "unknown"))
    if newest.get("host") != platform.node() or not isinstance(newest.get("pid"), int):
        return "unknown"
    if not is_alive(newest):
        return "killed"
    found = signature(log)
    return "running" if found is None or newest.get("inode", found[0]) == found[0] else "unknown"


def _newest(events: Sequence[Mapping[str, Any]], *names: str) -> Mapping[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] in names), None)


def resume_command(path: Path) -> str:
    """The command that starts a run again; for a stage, that of its pipeline."""
    path = path.absolute()
    whole = path.parent.parent
    is_stage = path.parent.name == "stages" and (whole / "pipeline.json").is_file()
    return f"tidemill resume {shlex.quote(str(whole if is_stage else path))}"


def is_alive(session: Mapping[str, Any]) -> bool:
    """Whether the process of a `session_start` event of this machine is alive: not a zombie, and not another process
    that got its number."""
    pid = session["pid"]
    try:
        os.kill(pid, 0)
    except PermissionError:  # alive, of another user
        pass
    except (OSError, OverflowError):
        return False
    start = process_start(pid)
    return start != 0 and start == session.get("pid_start", start)


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine's start; 0 of a zombie, None where that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


class StateReader:
    """The state of one run, looked at again and again, by a monotonic clock."""

    def __init__(self, log: Path, clock: Callable[[], float]) -> None:
        self._log, self._clock, self._changed_s = log, clock, clock()
        self._files: object = None
        self._doubted: object = None  # the files when the run's process was first found dead, or elsewhere

    def look(
        self, events: Sequence[Mapping[str, Any]], live: LiveState | None, files: object, *, usual_step_s: float
    ) -> RunState:
        """The state now, from events of sessions and of waiting; `files` is equal while no file of the run changes."""
        if files != self._files:
            self._files, self._changed_s = files, self._clock()
        session, outcome = _newest(events, SESSION_START, SESSION_END), outcome_of(events, self._log)
        if session is None:
            return RunState(name="unknown", text="No session has started.")
        if session["event"] == SESSION_END:
            return _ended(outcome, str(session.get("error", "")))
        loads = events[-1]["event"] == SESSION_START
        still_s = self._clock() - self._changed_s
        limit_s = max(LOADING_S if loads else STALLED_S, STALLED_STEPS * usual_step_s)
        if outcome == "running":
            self._doubted = None
        else:
            self._doubted = files if self._doubted is None else self._doubted
            if files == self._doubted or still_s > limit_s:
                return _state("killed" if outcome == "killed" else "unknown")
            # The files change although there is no such process here: it is on another machine or in a container.
        if live is not None and live.session == session.get("session") and live.activity == "paused":
            return _state("paused", live.activity_text)
        if still_s > limit_s:
            whole_minutes = still_s // 60 * 60  # a text that changes every second would be sent every second
            return _state("stalled", f"Nothing has changed for {duration(whole_minutes)}.")
        if events[-1]["event"] == WAITING:
            return _state("waiting", f"It waits for {events[-1].get('awaited')}.")
        return _state("running", "It loads its models." if loads else "")


def _ended(outcome: str, error: str) -> RunState:
    if outcome == "failed" and error.startswith(GuardStop.__name__):
        return _state("guard", error.partition(": ")[2])
    return _state(outcome if outcome in ("finished", "failed") else "interrupted", error)  # type: ignore[arg-type]


def _state(name: StateName, more: str = "") -> RunState:
    return RunState(name=name, text=f"{TEXTS[name]} {more}".rstrip())
