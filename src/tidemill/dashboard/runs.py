"""The watched runs: found below a folder, read on threads."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tidemill.core.errors import UserError
from tidemill.core.folders import similar_path
from tidemill.gateway.access import LOG
from tidemill.gateway.errors import ApiError
from tidemill.guard.checks import CheckQueue
from tidemill.telemetry.followed_file import signature
from tidemill.telemetry.live_state import read_live
from tidemill.telemetry.openmetrics import Figure, run_figures
from tidemill.telemetry.run_data import NO_RUN, RunData
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.run_list import RunList, RunRow, find_runs, run_key
from tidemill.telemetry.run_reader import RunReader
from tidemill.telemetry.sample_index import SampleIndex

T = TypeVar("T")

FIND_S = 2.0
"""A folder is searched for runs at most so often."""
READ_S, FIGURES_S = 0.5, 5.0
"""Time in which runs are read for one answer; the others wait for the next one."""
FIGURES_FROM = ("metrics.jsonl", "events.jsonl", "live.json")
MOST_READERS = 12
"""Runs whose histories are kept in memory while nobody listens to them."""


class WatchedRun:
    """A run and its reader, which one thread uses at a time."""

    def __init__(self, key: str, path: Path) -> None:
        self.key, self.path = key, path
        self.news: dict[str, Any] = {}
        """Cursor, step and state, as of the last refresh."""
        self.changes = 0
        """Refreshes that found something new."""
        self._changed = set[str]()  # since `take_changes`
        self.lock = asyncio.Lock()
        self._reader: RunReader | None = None
        self._samples: SampleIndex | None = None
        self._checks: CheckQueue | None = None

    async def refresh(self) -> None:
        """Read what is new.

        Raises:
            FileNotFoundError: the run was deleted.
            UserError: it cannot be read.
        """
        async with self.lock:
            await asyncio.to_thread(self._refresh)

    async def read(self, work: Callable[[RunReader], T]) -> T:
        """Refresh, and call `work` on a thread. Raises as `refresh`."""
        async with self.lock:
            return await asyncio.to_thread(lambda: work(self._refresh()))

    @property
    def data(self) -> RunData:
        """What was read last; for threads that have the lock."""
        assert self._reader is not None, "refreshed"
        return self._reader.data

    def samples(self) -> SampleIndex:
        """The index of the run's samples, with the newest; for threads that have the lock."""
        self._samples = self._samples or SampleIndex(RunDirectory(self.path))
        self._samples.refresh()
        return self._samples

    def checks(self) -> CheckQueue:
        """The run's queue, a new one when all samples are judged; for threads that have the lock."""
        if self._checks is None or not self._checks.waiting():
            self._checks = CheckQueue(self.path, warn=LOG.warning)
        return self._checks

    def take_changes(self) -> set[str]:
        """What has changed since the last call: names of `RunReader.refresh`, and `state`."""
        changed, self._changed = self._changed, set()
        return changed

    def _refresh(self) -> RunReader:
        if not self.path.is_dir():
            raise FileNotFoundError(self.path)
        reader = self._reader = self._reader or RunReader(self.path)
        changed = set(reader.refresh())
        metrics, state = reader.data.metrics, reader.state
        news = {
            "run": self.key,
            "cursor": reader.cursor,
            "step": metrics.last_step,
            "state": state.name,
            "text": state.text,
        }
        if changed or news != self.news:
            self.news, self.changes = news, self.changes + 1
            self._changed |= changed | {"state"}
        return reader


class WatchedFolder:
    """The runs below a folder by key, or the single run that was named.

    Args:
        wait: for a run to appear in the folder, which need not exist yet.

    Raises:
        UserError: there is no such folder, it cannot be read, or has no run.
    """

    def __init__(self, root: Path, *, wait: bool = False) -> None:
        self.root = root
        self._list, self._listing = RunList(root), asyncio.Lock()
        self._open: OrderedDict[str, WatchedRun] = OrderedDict()
        self._figures = dict[str, tuple[tuple[object, ...], list[Figure]]]()
        self._find()
        if wait or self._paths:
            return
        if not root.exists():
            raise UserError("no such run or folder", where=str(root), hint=similar_path(root) or NO_RUN)
        if not root.is_dir():
            raise UserError("a file, not a run directory or a folder with some", where=str(root), hint=NO_RUN)
        raise UserError("no run in this folder", where=str(root), hint=f"{NO_RUN}, or a folder above it")

    @property
    def single(self) -> str:
        """The key, if a run was named, and not a folder."""
        return next(iter(self._paths)) if [*self._paths.values()] == [self.root] else ""

    def _find(self) -> None:
        self._paths = {run_key(self.root, path): path for path in find_runs(self.root)}
        self._found_s = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether `rows` has read every run."""
        return self._list.complete

    async def rows(self) -> list[RunRow]:
        """The table of runs."""
        async with self._listing:
            rows = await asyncio.to_thread(self._list.refresh, within_s=READ_S)
            self._paths = dict(self._list.paths)
        return rows

    async def run(self, key: str) -> WatchedRun:
        """Raises ApiError: there is no such run."""
        if key not in self._paths and time.monotonic() - self._found_s > FIND_S:
            await asyncio.to_thread(self._find)
        if key not in self._paths:
            raise ApiError(404, "there is no such run here", code="unknown_run")
        run = self._open.get(key) or WatchedRun(key, self._paths[key])
        self._open[key] = run
        self._open.move_to_end(key)
        while len(self._open) > MOST_READERS:
            self._open.popitem(last=False)  # a listener keeps its run
        return run

    async def figures(self) -> list[Figure]:
        """The newest figures of all runs; the files of a run are read again after a change."""
        rows = await self.rows()
        pipelines, until_s = {row.pipeline for row in rows}, time.monotonic() + FIGURES_S
        async with self._listing:
            return await asyncio.to_thread(
                lambda: [each for row in rows if row.key not in pipelines for each in self._figures_of(row, until_s)]
            )

    def _figures_of(self, row: RunRow, until_s: float) -> list[Figure]:
        stamp = (row.state.name, *(signature(row.path / name) for name in FIGURES_FROM))
        if self._figures.get(row.key, ((), []))[0] != stamp and time.monotonic() < until_s:
            with suppress(UserError, OSError):  # a run that cannot be read has no figures
                data, live = RunData.load(RunDirectory(row.path)), read_live(row.path)
                place = row.path.relative_to(self.root).as_posix()
                figures = run_figures(row.name if place == "." else place, data, state=row.state.name, live=live)
                self._figures[row.key] = stamp, figures
        return self._figures.get(row.key, ((), []))[1]
