"""A run directory that is read again and again while the run, or another one, writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tidemill.core.errors import UserError
from tidemill.telemetry.followed_file import signature
from tidemill.telemetry.live_state import LIVE, LiveState, read_live
from tidemill.telemetry.manifest import FORECAST
from tidemill.telemetry.metrics import STEP_TIME
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.run_logs import RunLogs
from tidemill.telemetry.run_state import TEXTS, RunState, StateReader

OF_DATA = frozenset({"metrics", "events", "summary", "manifest"})
RECENT_STEPS = 20
"""Steps from which the usual duration of a step is taken."""


class RunReader:
    """The newest state of a run. After the first `refresh` another one reads only what was added."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.live: LiveState | None = None
        self.problem = "Not read yet."  # why the run cannot be read; empty if it can
        self._run = RunDirectory(path)
        self._logs = RunLogs(self._run)
        self._seen = dict[str, Any]()
        self._data: RunData | None = None
        self._states = StateReader(self._run.events, clock)

    def refresh(self) -> frozenset[str]:
        """Look for changes.

        Returns:
            What changed: "metrics", "events", "samples", "live", "summary", "manifest" (with the configuration and the
            forecast) or "checks". Without a change only sizes of files and the manifest are read.
        """
        run = self._run
        try:
            now: dict[str, Any] = {
                "samples": (signature(run.samples), signature(run.samples_index)),
                "live": signature(self.path / LIVE),
                "summary": signature(run.summary),
                "manifest": (signature(run.manifest), signature(run.config), signature(self.path / FORECAST)),
                "checks": signature(run.checks) and [signature(file) for file in sorted(run.checks.iterdir())],
            }
            changed = self._logs.refresh() | {name for name in now if now[name] != self._seen.get(name)}
            if "live" in changed:
                self.live = read_live(self.path)
            if "manifest" in changed:
                run.refuse_other_format()
            if self._data is None or changed & OF_DATA:
                data = RunData.of(run, self._logs)
                if any(lines for lines, _ in data.line_counts.values()) and not (data.metrics or data.sessions):
                    raise UserError("no run: its files are of another program, or damaged")
                self._data = data
            self._seen, self.problem = now, ""
        except (UserError, OSError) as error:
            problem = f"cannot be read: {error}" if isinstance(error, OSError) else str(error)
            changed = {"manifest"} if problem != self.problem else set()
            self._seen, self._data, self.problem = {}, None, problem
        return frozenset(changed)

    @property
    def data(self) -> RunData:
        """What was read. Another object after a change; it shares metrics and events with the earlier one.

        Raises:
            UserError: the run could not be read.
        """
        if self._data is None:
            raise UserError(self.problem, where=str(self.path))
        return self._data

    @property
    def cursor(self) -> str:
        """`INODE.GENERATION.STEP`; the first two change if the history was replaced."""
        return self._logs.cursor

    @property
    def state(self) -> RunState:
        """What the run is doing, as of the last `refresh`. Looks for its process."""
        if self._data is None:
            return RunState(name="unknown", text=self.problem)
        events, recent = self._logs.events, self._logs.metrics[-RECENT_STEPS:]
        steps_s = [line.values[STEP_TIME] for line in recent if STEP_TIME in line.values]
        if not events and self._data.stored_summary.get("outcome") == "finished":  # a stage without events
            return RunState(name="finished", text=TEXTS["finished"])
        files = (self.live and self.live.beat, self.cursor, len(events))
        return self._states.look(
            [*events.sessions[-1:], *events.newest],
            self.live,
            files,
            usual_step_s=median(steps_s) if steps_s else 0.0,
        )
