"""What a run is doing: its state in one word and one sentence, from its events, live.json and its process.

The lock file is never touched: a reader that takes it would stop the run from starting. Clocks of other machines are
not compared with ours: what matters is whether the files have changed since the reader looked last.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tidemill.core.formatting import duration
from tidemill.core.records import Record
from tidemill.telemetry.events import SESSION_END, SESSION_START, WAITING
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.live_state import LiveState

StateName: TypeAlias = Literal[
    "running", "paused", "stalled", "killed", "finished", "failed", "interrupted", "guard", "waiting", "unknown"
]
LIVELY: frozenset[StateName] = frozenset({"running", "paused", "stalled", "waiting", "unknown"})
"""States in which the files may still change."""
STALLED_S, STALLED_STEPS = 60.0, 5.0
"""A run is stalled if nothing changed for this time and for this many usual steps."""
TEXTS: dict[StateName, str] = {
    "running": "The run is in progress.",
    "paused": "The run is paused.",
    "finished": "The run is finished.",
    "interrupted": "The run was interrupted; the same command resumes it.",
    "failed": "The run ended with an error; the same command resumes it.",
    "killed": "The run was killed; the same command resumes it.",
    "unknown": "No end was recorded: the run is in progress on another machine, or was killed.",
}


class RunState(Record):
    """The state of a run."""

    name: StateName
    text: str  # one sentence


def outcome_of(events: Sequence[Mapping[str, Any]]) -> str:
    """How the newest session ended. Without a `session_end`, whether its process is alive on this machine."""
    newest = _newest(events, SESSION_START, SESSION_END)
    if newest is None:
        return "unknown"
    if newest["event"] == SESSION_END:
        return str(newest.get("outcome", "unknown"))
    if newest.get("host") != platform.node() or not isinstance(newest.get("pid"), int):
        return "unknown"
    return "running" if is_alive(newest) else "killed"


def _newest(events: Sequence[Mapping[str, Any]], *names: str) -> Mapping[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] in names), None)


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


class Heartbeat:
    """When a run's files last changed, by the clock of the process that reads them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest: object = None
        self._doubted: object = None  # the files when the run's process was first found dead, or elsewhere
        self._changed_s = clock()

    def note(self, files: object, *, alive: bool) -> None:
        """Take down the state of the files, and whether the run's process was found."""
        if files != self._latest:
            self._latest, self._changed_s = files, self._clock()
        if alive:
            self._doubted = None
        elif self._doubted is None:
            self._doubted = files

    @property
    def still_s(self) -> float:
        """For how long nothing has changed."""
        return self._clock() - self._changed_s

    @property
    def beats(self) -> bool:
        """Whether the files changed although no process was found: it is on another machine or in a container."""
        return self._doubted is not None and self._doubted != self._latest


def state_of(
    events: Sequence[Mapping[str, Any]],
    live: LiveState | None,
    *,
    heartbeat: Heartbeat,
    outcome: str,
    recorded: str = "",
    usual_step_s: float = 0.0,
    newest: Mapping[str, Any] | None = None,
) -> RunState:
    """The state of a run.

    Args:
        events: at least those of sessions.
        live: of live.json.
        outcome: by `outcome_of`.
        recorded: the outcome in summary.json; of some stages that is all.
        newest: the last event of the log.
    """
    session = _newest(events, SESSION_START, SESSION_END)
    if session is None:
        ended = recorded == "finished"
        return RunState(
            name="finished" if ended else "unknown", text=TEXTS["finished"] if ended else "Not started yet."
        )
    if session["event"] == SESSION_END:
        error = str(session.get("error", ""))
        if outcome == "failed" and error.startswith("GuardStop"):
            reason = error.partition(": ")[2].rstrip(".")
            return RunState(name="guard", text=f"The guard ended the run: {reason}.")
        if outcome == "failed":
            return RunState(name="failed", text=f"{TEXTS['failed']} {error}".rstrip())
        name: StateName = "finished" if outcome == "finished" else "interrupted"
        return RunState(name=name, text=TEXTS[name])
    limit_s = max(STALLED_S, STALLED_STEPS * usual_step_s)
    if outcome != "running" and not (heartbeat.beats and heartbeat.still_s <= limit_s):
        name = "killed" if outcome == "killed" else "unknown"
        return RunState(name=name, text=TEXTS[name])
    if live is not None and live.session == session.get("session") and live.activity == "paused":
        return RunState(name="paused", text=f"{TEXTS['paused']} {live.activity_text}".rstrip())
    if heartbeat.still_s > limit_s:
        text = f"The process is alive, but nothing has changed for {duration(heartbeat.still_s)}."
        return RunState(name="stalled", text=text)
    if newest is not None and newest["event"] == WAITING:
        waited = duration(finite_number(newest.get("waited_s")) or 0.0)
        return RunState(name="waiting", text=f"The run has waited {waited} for {newest.get('awaited')}.")
    return RunState(name="running", text=TEXTS["running"])
