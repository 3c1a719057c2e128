"""The watched runs: found below a folder, read on threads."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
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
LOOK_S = 0.2
"""A run is looked at at most so often, however many clients wait for changes."""
READ_S = 0.5
"""Time in which runs are read for one answer; the others wait for the next one."""
FIGURES_FROM = ("metrics.jsonl", "events.jsonl", "live.json")
MOST_READERS = 12
"""Runs whose histories are kept in memory while nobody listens to them."""


class Watched:
    """A run or a folder. Each look that finds something new has a number, by which clients ask for what changed."""

    def __init__(self) -> None:
        self.news: dict[str, Any] = {}
        """Of the last look."""
        self.changes = 0
        self._newest = dict[str, int]()  # number by name of what changed

    async def look(self) -> None:
        """Read what is new, unless that was done just now."""
        raise NotImplementedError

    def changed_after(self, number: int) -> list[str]:
        """Names of what has changed since the look with this number."""
        return [name for name, newest in self._newest.items() if newest > number]

    def _found(self, names: Iterable[str]) -> None:
        self.changes += 1
        self._newest |= dict.fromkeys(names, self.changes)


class WatchedRun(Watched):
    """A run and its reader, which one thread uses at a time."""

    def __init__(self, key: str, path: Path) -> None:
        super().__init__()
        self.key, self.path = key, path
        self.lock = asyncio.Lock()
        self._looked_s = -math.inf
        self._reader: RunReader | None = None
        self._samples: SampleIndex | None = None
        self._checks: CheckQueue | None = None

    async def look(self) -> None:
        """Read what is new, unless that was done just now. Raises as `refresh`."""
        async with self.lock:
            if time.monotonic() - self._looked_s >= LOOK_S:
                await asyncio.to_thread(self.refresh)

    async def read(self, work: Callable[[RunReader], T]) -> T:
        """Refresh, and call `work` on a thread. Raises as `refresh`."""
        async with self.lock:
            return await asyncio.to_thread(lambda: work(self.refresh()))

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

    def refresh(self) -> RunReader:
        """The reader, with what is new; for threads that have the lock.

        Raises:
            FileNotFoundError: the run was deleted.
            UserError: it cannot be read.
        """
        if not self.path.is_dir():
            raise FileNotFoundError(self.path)
        reader = self._reader = self._reader or RunReader(self.path)
        changed, state = reader.refresh(), reader.state
        news = {"step": reader.data.metrics.last_step, "state": state.name, "text": state.text}
        if changed or news != self.news:
            self.news = news
            self._found({*changed, "state"})
        self._looked_s = time.monotonic()
        return reader


class WatchedFolder(Watched):
    """The runs below a folder by key, or the single run that was named.

    Args:
        wait: for a run to appear in the folder, which need not exist yet.

    Raises:
        UserError: there is no such folder, it cannot be read, or has no run.
    """

    def __init__(self, root: Path, *, wait: bool = False) -> None:
        super().__init__()
        self.root = root
        self._rows = list[RunRow]()
        self._listed_s = -math.inf
        self._list, self._listing = RunList(root), asyncio.Lock()
        self._open: OrderedDict[str, WatchedRun] = OrderedDict()
        self._figures = dict[str, tuple[tuple[object, ...], list[Figure]]]()
        self._paths = {run_key(root, path): path for path in find_runs(root)}
        if wait or self._paths:
            return
        if root.is_dir():
            raise UserError("no run in this folder", where=str(root), hint=f"{NO_RUN}, or a folder above it")
        what = "a file, not a run directory or a folder with some" if root.exists() else "no such run or folder"
        raise UserError(what, where=str(root), hint=similar_path(root) or NO_RUN)

    @property
    def single(self) -> str:
        """The key, if a run was named, and not a folder."""
        return next(iter(self._paths)) if [*self._paths.values()] == [self.root] else ""

    async def look(self) -> None:
        """Read the table of runs, unless that was done just now."""
        if time.monotonic() - self._listed_s >= FIND_S or not self._list.complete:
            await self.rows()

    async def rows(self) -> list[RunRow]:
        """The table of runs."""
        async with self._listing:
            rows = await asyncio.to_thread(self._list.refresh, within_s=READ_S)
            if rows != self._rows:
                self._found(["rows"])
            self._rows, self._paths, self._listed_s = rows, dict(self._list.paths), time.monotonic()
        return rows

    async def run(self, key: str) -> WatchedRun:
        """Raises ApiError: there is no such run."""
        if key not in self._paths:
            await self.look()
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
        pipelines = {row.pipeline for row in rows}
        runs = [row for row in rows if row.key not in pipelines]
        return await asyncio.to_thread(lambda: [figure for row in runs for figure in self._figures_of(row)])

    def _figures_of(self, row: RunRow) -> list[Figure]:
        stamp = (row.state.name, *(signature(row.path / name) for name in FIGURES_FROM))
        earlier, figures = self._figures.get(row.key, ((), []))
        if earlier != stamp:
            with suppress(UserError, OSError):  # a run that cannot be read has no figures
                data, live = RunData.load(RunDirectory(row.path)), read_live(row.path)
                place = row.path.relative_to(self.root).as_posix()
                figures = run_figures(row.name if place == "." else place, data, state=row.state.name, live=live)
                self._figures[row.key] = stamp, figures
        return figures
