"""The runs below a folder, each as a row: state, step, headline figure, cost; or why it cannot be read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tidemill.core.formatting import natural_sort_key
from tidemill.core.records import Record
from tidemill.telemetry.followed_file import Signature, signature
from tidemill.telemetry.run_data import headline_figure
from tidemill.telemetry.run_dir import read_json
from tidemill.telemetry.run_reader import RunReader
from tidemill.telemetry.run_state import LIVELY, TEXTS, RunState, StateName

DEPTH = 6
PIPELINE = "pipeline.json"
INSIDE = frozenset({"abandoned", "checkpoints", "checks", "control", "judges", "samples"})
"""Folders of a run that have no runs."""
SPARKS = 60
FILES = ("events.jsonl", "metrics.jsonl", "summary.json", "manifest.json", "config.toml")
STAGE_STATES: dict[str, StateName] = {
    "done": "finished", "finished": "finished", "failed": "failed", "interrupted": "interrupted",
}  # fmt: skip
"""States in pipeline.json that its stages' own files need not have."""


class RunRow(Record):
    """A run, or a pipeline, whose stages follow it."""

    path: Path
    key: str
    name: str
    state: RunState
    step: int = 0  # of a pipeline: finished stages
    total_steps: int = 0
    figure: str = ""  # name of the headline figure
    value: float | None = None
    interval: tuple[float, float] | None = None  # 95 %
    cost_usd: float = 0.0
    sparkline: tuple[float, ...] = ()  # at most SPARKS values of that figure
    started: str = ""
    pipeline: str = ""  # key of the pipeline whose stage it is
    problem: str = ""  # why it cannot be read


def run_key(root: Path, path: Path) -> str:
    """The name of a run in URLs: a digest of its path below `root`."""
    return blake2b(path.relative_to(root).as_posix().encode(), digest_size=8).hexdigest()


def find_runs(folder: Path) -> list[Path]:
    """Runs and pipelines in `folder` and up to `DEPTH` levels below it, each once, by path. Of what is linked
    there, only a run is looked into."""
    found, seen = list[Path](), set[tuple[int, int]]()

    def look(path: Path, depth: int) -> None:
        try:
            status = path.stat()
            with os.scandir(path) as entries:
                folders = {entry.name: entry.is_dir() for entry in entries}
        except PermissionError:
            found.append(path)  # perhaps a run: its row says why it is not shown
            return
        except OSError:  # a link to itself, or deleted since
            return
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        is_run = _is_run(folders)
        if is_run:
            found.append(path)
        linked = depth > 0 and path.is_symlink()
        if depth < DEPTH and (is_run or not linked):
            inner = [name for name, is_folder in folders.items() if is_folder and not name.startswith(".")]
            for name in sorted(inner, key=natural_sort_key):
                if not (is_run and name in INSIDE):
                    look(path / name, depth + 1)

    look(folder, 0)
    return found


def _is_run(names: dict[str, bool]) -> bool:
    logs = any(names.get(name) is False for name in ("events.jsonl", "metrics.jsonl", PIPELINE))
    return logs or ("config.toml" in names and ("manifest.json" in names or "samples" in names))


class RunList:
    """The rows of a folder. Only runs whose files changed are read again, and only lively ones are kept in memory."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.paths = dict[str, Path]()  # by key
        self._clock = clock
        self._readers = dict[Path, RunReader]()
        self._rows = dict[Path, tuple[Any, RunRow]]()

    def refresh(self) -> list[RunRow]:
        """The rows now, in the order of `find_runs`."""
        paths = find_runs(self.folder)
        self.paths = {run_key(self.folder, path): path for path in paths}
        for gone in self._rows.keys() - set(paths):
            self._rows.pop(gone)
            self._readers.pop(gone, None)
        rows = {path: self._row(path) for path in paths}
        for path in paths:
            if signature_or_none(path / PIPELINE) is not None:
                self._add_stages(path, rows)
        return list(rows.values())

    def _row(self, path: Path) -> RunRow:
        now = [signature_or_none(path / name) for name in FILES]
        earlier, row = self._rows.get(path, (None, None))
        if row is not None and earlier == now and row.state.name not in LIVELY:
            return row
        reader = self._readers.setdefault(path, RunReader(path, clock=self._clock))
        changed = reader.refresh()
        try:
            if reader.problem:
                row = self._without_figures(path, reader.problem)
            elif row is None or changed - {"live", "samples", "checks"}:
                row = self._read(reader)
            else:
                row = replace(row, state=reader.state)
        except Exception as error:  # noqa: BLE001 - a file of another program must not hide the runs beside it
            row = self._without_figures(path, f"cannot be read ({type(error).__name__}: {error})")
        self._rows[path] = now, row
        if row.state.name not in LIVELY:
            del self._readers[path]
        return row

    def _read(self, reader: RunReader) -> RunRow:
        data = reader.data
        if sum(lines for lines, _ in data.line_counts.values()) and not data.metrics and not data.sessions:
            return self._without_figures(reader.path, "no run: its files are of another program, or damaged")
        headline = headline_figure(data)
        values = headline.history
        if len(values) > SPARKS:
            values = [values[round(at * (len(values) - 1) / (SPARKS - 1))] for at in range(SPARKS)]
        return RunRow(
            path=reader.path,
            key=run_key(self.folder, reader.path),
            name=data.name,
            state=reader.state,
            step=data.metrics.last_step,
            total_steps=data.total_steps,
            figure=headline.name,
            value=headline.value,
            interval=headline.interval,
            cost_usd=data.summary["cost_usd"],
            sparkline=tuple(values),
            started=str(data.manifest.get("created", "")),
        )

    def _without_figures(self, path: Path, problem: str) -> RunRow:
        state = RunState(name="unknown", text=problem)
        return RunRow(path=path, key=run_key(self.folder, path), name=path.name, state=state, problem=problem)

    def _add_stages(self, path: Path, rows: dict[Path, RunRow]) -> None:
        """Fill in the row of a pipeline from those of its stages, and the states that only pipeline.json has."""
        pipeline, key, stages = read_json(path / PIPELINE), rows[path].key, list[RunRow]()
        due = [stage for stage in pipeline.get("stages", ()) if isinstance(stage, dict)]
        for stage in due:
            folder = path / str(stage.get("folder"))
            if (row := rows.get(folder)) is None:
                continue
            if row.state.name == "unknown" and (name := STAGE_STATES.get(str(stage.get("state")))):
                row = replace(row, state=RunState(name=name, text=TEXTS[name]), problem="")
            rows[folder] = replace(row, pipeline=key)
            stages.append(rows[folder])
        name = STAGE_STATES.get(str(pipeline.get("outcome")))
        state = RunState(name=name, text=TEXTS[name].replace("run", "pipeline")) if name else None
        newest = next((row for row in reversed(stages) if row.value is not None), rows[path])
        rows[path] = RunRow(
            path=path,
            key=key,
            name=str(pipeline.get("name", path.name)),
            state=state or (stages[-1].state if stages else rows[path].state),
            step=sum(stage.get("state") == "done" for stage in due),
            total_steps=len(due),
            figure=newest.figure,
            value=newest.value,
            interval=newest.interval,
            cost_usd=sum(row.cost_usd for row in stages),
            started=min((row.started for row in stages if row.started), default=""),
            problem="" if due else "pipeline.json is damaged or of another program",
        )


def signature_or_none(path: Path) -> Signature | None:
    """None for a file that is missing or may not be looked at."""
    try:
        return signature(path)
    except OSError:
        return None
