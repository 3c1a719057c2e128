"""The logs of a run, read as they grow: metrics in columns, and events of long runs compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tidemill.telemetry.events import DECODE, PUBLISH, PULL, ROLLOUT, TRAINING
from tidemill.telemetry.followed_file import FollowedFile, signature
from tidemill.telemetry.jsonl import encode, line_object
from tidemill.telemetry.metric_table import MetricTable, Rows
from tidemill.telemetry.metrics import parse_metrics
from tidemill.telemetry.run_dir import RunDirectory

FREQUENT = frozenset({ROLLOUT, TRAINING, PUBLISH, PULL, DECODE})
"""Events of every step. Figures need no more of them than `EventLog.outline` has."""
FIGURES = ("event", "session", "lease", "worker", "kind", "elapsed_s", "duration_s", "tokens")
"""Keys of a `decode` event that figures need."""
RECENT_EVENTS = 8192
"""Newest events that are kept as they are."""
BLOCK_EVENTS = 512


class EventLog(Rows[dict[str, Any]]):
    """The events of a run in order. Older ones are compressed to about a twentieth and decoded on access."""

    def __init__(self) -> None:
        self._blocks = list[bytes]()  # of BLOCK_EVENTS each
        self._recent = list[dict[str, Any]]()
        self._outline = list[dict[str, Any]]()
        self._newest = dict[Any, dict[str, Any]]()  # frequent event of each session

    def append(self, event: dict[str, Any]) -> None:
        name = event["event"]
        self._recent.append(event)
        if name not in FREQUENT:
            self._outline.append(event)
        elif name == DECODE:
            self._outline.append({key: event[key] for key in FIGURES if key in event})
        else:
            self._newest[event.get("session")] = event
        if len(self._recent) >= RECENT_EVENTS + BLOCK_EVENTS:
            older = self._recent[:BLOCK_EVENTS]
            self._blocks.append(zlib.compress(b"\n".join(map(encode, older)), level=1))
            del self._recent[:BLOCK_EVENTS]

    @property
    def outline(self) -> list[dict[str, Any]]:
        """What figures are computed from: the events that are not of every step, the figures of `decode` events, and
        the newest event of each session."""
        return [*self._outline, *self._newest.values()]

    def named(self, *names: str) -> list[dict[str, Any]]:
        """The events with one of these names."""
        events = self if FREQUENT.intersection(names) else self._outline
        return [event for event in events if event["event"] in names]

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK_EVENTS + len(self._recent)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for block in self._blocks:
            yield from _events(block)
        yield from self._recent

    def item(self, at: int) -> dict[str, Any]:
        block, place = divmod(at, BLOCK_EVENTS)
        return _events(self._blocks[block])[place] if block < len(self._blocks) else self._recent[at - len(self)]


@lru_cache(maxsize=2)
def _events(block: bytes) -> list[dict[str, Any]]:
    return [line_object(line) or {} for line in zlib.decompress(block).split(b"\n")]


class RunLogs:
    """metrics.jsonl and events.jsonl of a run, and up to where they were read."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._manifest: tuple[Any, int] = (None, 0)
        self.metrics, self.events = MetricTable(), EventLog()
        self.metrics_file = FollowedFile(run.metrics, self._generation)
        self.events_file = FollowedFile(run.events)

    def _generation(self) -> int:
        seen = signature(self._run.manifest)
        if seen != self._manifest[0]:
            self._manifest = seen, self._run.generation
        return self._manifest[1]

    @property
    def cursor(self) -> str:
        """`INODE.GENERATION.STEP`; the first two change if the history is replaced."""
        file, step = self.metrics_file, self.metrics.steps[-1] if self.metrics else 0
        return f"{file.inode}.{file.generation + file.replaced}.{step}"

    def refresh(self) -> set[str]:
        """Read what is new. Returns "metrics" and "events" where something is.

        Raises:
            OSError: a log cannot be read.
        """
        changed = set[str]()
        for block in self.metrics_file.new_lines():
            changed.add("metrics")
            if block.reset:
                self.metrics = MetricTable()  # another object: pages that are being written keep the earlier one
            for line in block.lines:
                if line is not None and (row := parse_metrics(line)) is not None:
                    self.metrics.append(row)
        for block in self.events_file.new_lines():
            changed.add("events")
            if block.reset:
                self.events = EventLog()
            for line in block.lines:
                if line is not None and isinstance(line.get("event"), str):
                    self.events.append(line)
        return changed
