"""The runs below a folder, each as a row: state, step, headline figure, cost; or why it cannot be read."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tidemill.core.errors import UserError, exception_text
from tidemill.core.formatting import natural_sort_key
from tidemill.core.records import Record
from tidemill.telemetry.followed_file import signature
from tidemill.telemetry.run_data import RunData, headline_figure
from tidemill.telemetry.run_dir import read_json
from tidemill.telemetry.run_reader import OF_DATA, RunReader
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
    found, seen = list[Path](), set[str]()

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):
            found.append(Path(error.filename))  # perhaps a run: its row says why it is not shown

    for parent, folders, files in os.walk(folder, onerror=note, followlinks=True):
        path, place = Path(parent), os.path.realpath(parent)
        logs = not {"events.jsonl", "metrics.jsonl", PIPELINE}.isdisjoint(files)
        is_run = logs or ("config.toml" in files and ("manifest.json" in files or "samples" in folders))
        if is_run and place not in seen:
            found.append(path)
        too_deep = len(path.relative_to(folder).parts) == DEPTH
        linked = path != folder and path.is_symlink()
        inside = INSIDE if is_run else frozenset[str]()
        inner = [name for name in folders if not name.startswith(".") and name not in inside]
        folders[:] = [] if too_deep or place in seen or (linked and not is_run) else sorted(inner, key=natural_sort_key)
        seen.add(place)
    return found


class RunList:
    """The rows of a folder. Runs that have ended are read once, and not kept in memory."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.paths = dict[str, Path]()  # by key
        self._clock = clock
        self._readers = dict[Path, RunReader]()
        self._rows = dict[Path, tuple[list[Any], RunRow]]()

    def refresh(self, *, within_s: float = math.inf) -> list[RunRow]:
        """The rows now, in the order of `find_runs`.

        Args:
            within_s: after this time no run is read for the first time; its row is filled in by a later call.
        """
        deadline_s = self._clock() + within_s
        rows = {path: self._row(path, deadline_s) for path in find_runs(self.folder)}
        self.paths = {row.key: path for path, row in rows.items()}
        self._readers = {
            path: reader for path, reader in self._readers.items() if path in rows and rows[path].state.name in LIVELY
        }
        self._rows = {path: kept for path, kept in self._rows.items() if path in rows}
        for path, row in list(rows.items()):
            with suppress(OSError):  # not permitted
                if pipeline := read_json(path / PIPELINE):
                    rows[path] = _pipeline_row(row, pipeline, rows)
        return list(rows.values())

    @property
    def complete(self) -> bool:
        """Whether every run has been read."""
        return len(self._rows) == len(self.paths)

    def _row(self, path: Path, deadline_s: float) -> RunRow:
        reader = self._readers.get(path) or RunReader(path, clock=self._clock)
        row = RunRow(path=path, key=run_key(self.folder, path), name=path.name, state=reader.state)
        if path not in self._rows and self._clock() > deadline_s:
            return row
        try:
            now = [signature(path / name) for name in FILES]
            earlier, kept = self._rows.get(path, ([], row))
            if earlier == now and kept.state.name not in LIVELY:
                return kept
            changed, state = reader.refresh(), reader.state
            row = _filled(row, reader.data) if changed & OF_DATA or earlier != now else kept
            row = replace(row, state=state)
        except Exception as error:  # noqa: BLE001 - a file of another program must not hide the runs beside it
            problem = error.what if isinstance(error, UserError) else f"cannot be read: {exception_text(error)}"
            now = []
            row = replace(row, problem=problem, state=RunState(name="unknown", text=problem))
        self._readers[path], self._rows[path] = reader, (now, row)
        return row


def _filled(row: RunRow, data: RunData) -> RunRow:
    figure, summary = headline_figure(data), data.summary
    last, shown = len(figure.history) - 1, min(len(figure.history), SPARKS)
    return replace(
        row,
        name=data.name,
        step=data.metrics.last_step,
        total_steps=data.total_steps,
        figure=figure.name,
        value=figure.value,
        interval=figure.interval,
        cost_usd=summary["cost_usd"],
        sparkline=tuple(figure.history[round(at * last / max(1, shown - 1))] for at in range(shown)),
        started=str(data.manifest.get("created", "")),
    )


def _pipeline_row(row: RunRow, pipeline: dict[str, Any], rows: dict[Path, RunRow]) -> RunRow:
    """The row of a pipeline. Some stages have their state in pipeline.json only: it is filled in in `rows`."""
    stages, started = pipeline.get("stages"), list[RunRow]()
    due = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    for stage in due:
        path, name = row.path / str(stage.get("folder")), STAGE_STATES.get(str(stage.get("state")))
        if path in rows:
            own = rows[path]
            state = RunState(name=name, text=TEXTS[name]) if name and own.state.name == "unknown" else own.state
            rows[path] = replace(own, pipeline=row.key, state=state)
            started.append(rows[path])
    name = STAGE_STATES.get(str(pipeline.get("outcome")))
    state, done = started[-1].state if started else row.state, sum(stage.get("state") == "done" for stage in due)
    if name is None and state.name == "finished" and done < len(due):
        name = "unknown"  # between two stages, or killed there
    if name and not (name == "failed" and state.name in ("failed", "guard")):  # the stage says why
        state = RunState(name=name, text=TEXTS[name])
    newest = next((stage for stage in reversed(started) if stage.value is not None), row)
    return replace(
        newest,
        path=row.path,
        key=row.key,
        name=str(pipeline.get("name", row.name)),
        state=state,
        step=done,
        total_steps=len(due),
        cost_usd=sum(stage.cost_usd for stage in started),
        pipeline="",
        problem="" if due else "pipeline.json is damaged or of another program",
    )
