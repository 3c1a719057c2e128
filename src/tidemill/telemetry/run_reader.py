"""A run directory that is read again and again while the run, or another one, writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tidemill.core.errors import TidemillError, UserError
from tidemill.telemetry.followed_file import signature
from tidemill.telemetry.jsonl import disk_error
from tidemill.telemetry.live_state import LIVE, LiveState, read_live
from tidemill.telemetry.manifest import FORECAST
from tidemill.telemetry.metrics import STEP_TIME
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.run_logs import RunLogs
from tidemill.telemetry.run_state import Heartbeat, RunState, outcome_of, state_of

RECENT_STEPS = 20
"""Steps from which the usual duration of a step is taken."""


class RunReader:
    """The newest state of a run. After the first `refresh` another one reads only what was added.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.problem = ""  # why the run cannot be read; empty if it can
        self._run = RunDirectory(path)
        self._logs = RunLogs(self._run)
        self._seen = dict[str, Any]()
        self._data: RunData | None = None
        self._live: LiveState | None = None
        self._heartbeat = Heartbeat(clock)

    def refresh(self) -> frozenset[str]:
        """Look for changes.

        Returns:
            What changed: "metrics", "events", "samples", "live", "summary", "manifest" (with the configuration and the
            forecast) or "checks". Without a change only the sizes of files are read.
        """
        changed = set[str]()
        try:
            changed |= self._logs.refresh()
            now = self._signatures()
            changed |= {name for name, found in now.items() if found != self._seen.get(name)}
            if "live" in changed:
                self._live = read_live(self.path)
            if "manifest" in changed:
                self._run.refuse_other_format()
            if changed - {"live", "samples", "checks"}:
                self._data = RunData.of(self._run, self._logs)
            self._seen, self.problem = now, ""
        except (TidemillError, OSError) as error:
            problem = str(disk_error(error, self.path)) if isinstance(error, OSError) else str(error)
            changed |= {"manifest"} if problem != self.problem else set()
            self.problem, self._seen = problem, {}
        return frozenset(changed)

    def _signatures(self) -> dict[str, Any]:
        run = self._run
        return {
            "samples": (signature(run.samples), signature(run.samples / "index.jsonl")),
            "live": signature(self.path / LIVE),
            "summary": signature(run.summary),
            "manifest": (signature(run.manifest), signature(run.config), signature(self.path / FORECAST)),
            "checks": [signature(file) for file in sorted(run.checks.glob("*.jsonl"))],
        }

    @property
    def data(self) -> RunData:
        """What was read. Another object after a change; it shares metrics and events with the earlier one.

        Raises:
            UserError: the run could not be read.
        """
        if self._data is None:
            raise UserError(self.problem or "not read yet", where=str(self.path))
        return self._data

    @property
    def live(self) -> LiveState | None:
        """live.json."""
        return self._live

    @property
    def cursor(self) -> str:
        """`INODE.GENERATION.STEP`; the first two change if the history was replaced."""
        return self._logs.cursor

    @property
    def state(self) -> RunState:
        """What the run is doing, as of the last `refresh`. Looks for its process."""
        if self.problem or self._data is None:
            return RunState(name="unknown", text=self.problem or "not read yet")
        events, metrics = self._logs.events, self._logs.metrics
        outcome = outcome_of(events.outline)
        beat = self._live.beat if self._live else 0
        self._heartbeat.note((beat, self._logs.cursor, len(events)), alive=outcome == "running")
        steps_s = metrics.values(STEP_TIME)[-RECENT_STEPS:]
        return state_of(
            events.outline,
            self._live,
            heartbeat=self._heartbeat,
            outcome=outcome,
            recorded=str(self._data.stored_summary.get("outcome", "")),
            usual_step_s=median(steps_s) if steps_s else 0.0,
            newest=events.newest,
        )
