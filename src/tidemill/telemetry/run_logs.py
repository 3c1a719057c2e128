"""The logs of a run, read as they grow: metrics in columns, and of the events of long runs what figures need."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.telemetry.events import DECODE, PUBLISH, PULL, ROLLOUT, SESSION_END, SESSION_START, TRAINING, events_in
from tidemill.telemetry.fleet_figures import DECODED, LeaseKey, amount, decode_figures, lease_key
from tidemill.telemetry.followed_file import FollowedFile
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.metric_table import MetricTable
from tidemill.telemetry.metrics import parse_metrics
from tidemill.telemetry.run_dir import RunDirectory

FREQUENT = frozenset({ROLLOUT, TRAINING, PUBLISH, PULL, DECODE})
"""Events of every step. Figures need no more of them than `EventLog.outline` has."""


RECENT_BYTES = 2 << 20


class EventLog:
    """The events of a run in order. A log only grows: where all of it is needed, it is read again."""

    def __init__(self, path: Path) -> None:
        self._path, self._count = path, 0
        self.sessions = list[dict[str, Any]]()  # their starts and ends
        self._outline = list[dict[str, Any]]()
        self._decoded = array("d")
        self._leases = set[LeaseKey]()
        self.samples_by_worker, self.tokens_by_worker = Counter[str](), Counter[str]()  # generated
        self._latest = dict[Any, dict[str, Any]]()  # frequent event of each session
        self.newest = tuple[dict[str, Any], ...]()  # at most one

    def append(self, event: dict[str, Any]) -> None:
        name, self.newest = event["event"], (event,)
        self._count += 1
        if name in (SESSION_START, SESSION_END):
            self.sessions.append(event)
        if name in FREQUENT:
            self._latest[str(event.get("session"))] = event
        if name not in FREQUENT or (name == DECODE and lease_key(event) not in self._leases):
            self._outline.append(event)
        if name in (DECODE, TRAINING):
            self._decoded.extend(decode_figures(event))
        if name == DECODE:
            self._leases.add(lease_key(event))
            self.samples_by_worker[str(event.get("worker"))] += int(amount(event, "samples"))
            self.tokens_by_worker[str(event.get("worker"))] += int(amount(event, "tokens"))

    @property
    def outline(self) -> list[dict[str, Any]]:
        """What figures are computed from, beside `decoded`: the events that are not of every step, the first `decode`
        event of each lease, and the newest event of each session."""
        return [*self._outline, *self._latest.values()]

    @property
    def decoded(self) -> NDArray[np.float64]:
        """The figures of every `decode` and `training` event, as `decode_figures` has them. float64 [events, 5]"""
        return np.array(self._decoded).reshape(-1, len(DECODED))

    def named(self, *names: str) -> list[dict[str, Any]]:
        """The events with one of these names."""
        events = self if FREQUENT.intersection(names) else self._outline
        return [event for event in events if event["event"] in names]

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The events of the last `RECENT_BYTES`."""
        return [event for _, event in read_lines(self._path, last_bytes=RECENT_BYTES) if "event" in event]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return islice(events_in(self._path), self._count)


class RunLogs:
    """metrics.jsonl and events.jsonl of a run, and up to where they were read."""

    def __init__(self, run: RunDirectory) -> None:
        self.metrics, self.events = MetricTable(), EventLog(run.events)
        self.metrics_file = FollowedFile(run.metrics, lambda: run.generation)
        self.events_file = FollowedFile(run.events)

    @property
    def cursor(self) -> str:
        """`INODE.GENERATION.STEP`; the first two change if the history is replaced."""
        file = self.metrics_file
        return f"{file.inode}.{file.generation + file.replaced}.{self.metrics.last_step}"

    def refresh(self) -> set[str]:
        """Read what is new. Returns "metrics" and "events" where something is.

        Raises:
            OSError: a log cannot be read.
        """
        changed = set[str]()
        for lines, reset in self.metrics_file.new_lines():
            changed.add("metrics")
            if reset:
                self.metrics = MetricTable()  # another object: pages that are being written keep the earlier one
            for metrics in filter(None, map(parse_metrics, filter(None, lines))):
                self.metrics.append(metrics)
        self.metrics = self.metrics.in_order()
        for lines, reset in self.events_file.new_lines():
            changed.add("events")
            if reset:
                self.events = EventLog(self.events_file.path)
            for line in filter(None, lines):
                if isinstance(line.get("event"), str):
                    self.events.append(line)
        return changed
