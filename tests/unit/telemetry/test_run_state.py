from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill.telemetry.live_state import Activity, LiveState
from tidemill.telemetry.run_state import StateReader, is_alive, process_start

GONE = 2**22 + 12345  # beyond the largest process id of Linux
HERE = platform.node()


def start(pid: int, host: str = HERE, **more: Any) -> dict[str, Any]:
    return {"event": "session_start", "session": 1, "pid": pid, "host": host, **more}


def end(outcome: str, error: str = "") -> dict[str, Any]:
    return {"event": "session_end", "outcome": outcome, "error": error}


def live(activity: Activity, session: int = 1) -> LiveState:
    return LiveState(
        run_id="r", session=session, beat=1, unix_s=9e9, elapsed_s=1.0, step=3, total_steps=9, activity=activity,
        activity_text="Until 10:00.",
    )  # fmt: skip


LOG = Path(__file__)  # of the inode only
ME, WAITS, ROLLOUT = start(os.getpid()), {"event": "waiting", "awaited": "gold scores"}, {"event": "rollout"}


@pytest.mark.parametrize(
    ("events", "state", "text"),
    [
        ([], "unknown", "No session"),
        ([ME], "running", "in progress"),
        ([ME, WAITS], "waiting", "waits for gold scores"),
        ([ME, WAITS, ROLLOUT], "running", "in progress"),
        ([start(GONE)], "killed", "same command resumes"),
        ([start(GONE), end("failed"), ME], "running", ""),
        ([start(os.getpid(), host="elsewhere")], "unknown", "elsewhere"),
        ([start(os.getpid(), inode=LOG.stat().st_ino)], "running", "loads its models"),
        ([start(os.getpid(), inode=1)], "unknown", "elsewhere"),  # a copy
        ([ME, end("finished")], "finished", ""),
        ([ME, end("interrupted")], "interrupted", ""),
        ([ME, end("failed", "ValueError: no")], "failed", "ValueError: no"),
        ([ME, end("failed", "GuardStop: the reward rises")], "guard", "the reward rises"),
    ],
)
def test_the_state_follows_from_events_and_the_process(events: list[dict[str, Any]], state: str, text: str) -> None:
    found = StateReader(LOG, lambda: 0.0).look(events, None, 0, usual_step_s=1.0)
    assert found.name == state and text in found.text


@pytest.mark.parametrize(
    ("alive", "live_state", "state"),
    [
        (True, live("paused"), "paused"),
        (True, live("paused", session=0), "running"),  # of an earlier session
        (True, live("working"), "running"),
        (False, live("paused"), "killed"),
    ],
)
def test_live_json_counts_only_for_its_own_session_and_process(alive: bool, live_state: LiveState, state: str) -> None:
    events = [ME if alive else start(GONE)]
    assert StateReader(LOG, lambda: 0.0).look(events, live_state, 0, usual_step_s=1.0).name == state


@pytest.mark.parametrize(
    ("events", "usual_step_s", "after_s"),
    [([ME, ROLLOUT], 1.0, 60.0), ([ME, ROLLOUT], 100.0, 500.0), ([ME], 0.0, 3600.0)],
    ids=["fast", "slow", "loads a model"],
)
def test_a_run_stalls_when_its_files_stand_still(
    events: list[dict[str, Any]], usual_step_s: float, after_s: float
) -> None:
    now_s, files = 0.0, 0
    states = StateReader(LOG, lambda: now_s)

    def look() -> str:
        return states.look(events, None, files, usual_step_s=usual_step_s).name

    assert look() == "running"
    now_s = after_s
    assert look() == "running"
    now_s += 1.0
    assert look() == "stalled"
    text = states.look(events, None, files, usual_step_s=usual_step_s).text
    now_s += 1.0
    assert states.look(events, None, files, usual_step_s=usual_step_s).text == text, "not sent again every second"
    files += 1
    assert look() == "running"


@pytest.mark.parametrize(
    ("session", "before"),
    [(start(1, host="elsewhere"), "unknown"), (start(GONE), "killed")],
    ids=["machine", "container"],
)
def test_a_run_whose_process_is_elsewhere_runs_while_its_files_change(session: dict[str, Any], before: str) -> None:
    now_s = 0.0
    states = StateReader(LOG, lambda: now_s)
    assert states.look([session, ROLLOUT], None, 1, usual_step_s=1.0).name == before
    assert states.look([session, ROLLOUT], None, 2, usual_step_s=1.0).name == "running"
    now_s = 61.0
    assert states.look([session, ROLLOUT], None, 2, usual_step_s=1.0).name == before


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_another_process_with_the_same_number_and_a_zombie_are_not_the_run() -> None:
    pid, ticks = os.getpid(), process_start(os.getpid())
    assert ticks and is_alive(start(pid, pid_start=ticks)) and is_alive(start(pid))
    assert not is_alive(start(pid, pid_start=ticks - 1))
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has asked for its exit code
    assert not is_alive(start(child.pid))
    child.wait(timeout=10)
