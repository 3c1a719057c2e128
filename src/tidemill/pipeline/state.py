"""A pipeline's directory, and the state of its stages in pipeline.json and summary.json.

config.toml    every value of every stage              stages/NAME-DIGEST/            a stage's run directory
pipeline.json  which stages are finished or due        stages/NAME-DIGEST/stage.json  result, written last
summary.json   figures of every stage                  report.html                    figures and links
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import msgspec
from filelock import FileLock, Timeout

from tidemill.config.pipeline import subject
from tidemill.core.errors import UserError
from tidemill.core.folders import another_directory
from tidemill.pipeline.stage_plan import Action, FoundStage, Plan, PlannedStage, StageResult
from tidemill.telemetry.jsonl import disk_error, encode, remove_partial_files, write_atomically
from tidemill.telemetry.run_dir import LOCK, LockedDirectory, RunDirectory, read_json

RESULT_FILE = "stage.json"
DELETING = ".deleting-"  # prefix of folders that are being deleted
STAGE_LOCK = ".stage.lock"  # in a stage's folder
UPDATE_S = 30.0  # within which another process has written its files


class PipelineFolder:
    """`PipelineFolder(path)` is for reading; `PipelineFolder.open(path)` creates.

    Several processes may run stages at the same time, on machines that share the directory: each locks its stage, and
    the files about all stages while it changes them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages = path / "stages"
        self.config = path / "config.toml"
        self.state = path / "pipeline.json"
        self.summary = path / "summary.json"
        self.report = path / "report.html"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the directory, and finish an interrupted deletion.

        Raises:
            UserError: it cannot be written, or contains a single run.
        """
        folder = cls(path)
        folder.refuse_single_run()
        try:
            folder.stages.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            hint = "choose another --run.dir or move the file away"
            raise UserError("a file is in the place of a directory", where=str(path), hint=hint) from error
        except OSError as error:
            raise disk_error(error, path) from error
        for deleted in folder.stages.glob(f"{DELETING}*"):
            shutil.rmtree(deleted, ignore_errors=True)
        return folder

    def lock_stage(self, folder: str) -> LockedDirectory:
        """Lock a stage until the result is closed. Raises UserError: another process has locked it."""
        locked = LockedDirectory(self.stages / folder, lock_file=STAGE_LOCK)
        try:
            locked.path.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(error, locked.path) from error
        locked.acquire(lambda: "another process is running this stage")
        return locked

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While the files about all stages change. Raises UserError: another process holds them for too long."""
        lock = FileLock(self.path / LOCK, timeout=UPDATE_S, thread_local=False)
        try:
            lock.acquire()
        except Timeout as error:
            hint = f"find out which process has locked {self.path / LOCK}"
            raise UserError("another process is writing this pipeline", where=str(self.path), hint=hint) from error
        except OSError as error:
            raise disk_error(error, self.path / LOCK) from error
        try:
            remove_partial_files(self.path)
            yield
        finally:
            lock.release()

    def refuse_single_run(self) -> None:
        """Raises UserError: it is the directory of a run without stages."""
        if RunDirectory(self.path).manifest.exists():
            what = "this directory contains a single run, and the recipe has stages"
            raise UserError(what, where=str(self.path), hint=another_directory(self.path))

    def found(self) -> dict[str, FoundStage]:
        """The stages on disk by folder, including those of earlier configurations."""
        if not self.stages.is_dir():
            return {}
        found = dict[str, FoundStage]()
        folders = [each for each in sorted(self.stages.iterdir()) if each.is_dir() and not each.name.startswith(".")]
        for folder in folders:
            result: StageResult | None = None
            with suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
                result = msgspec.json.decode((folder / RESULT_FILE).read_bytes(), type=StageResult)
                product = self.product(folder.name, result)
                result = result if product is None or product.exists() else None
            found[folder.name] = FoundStage(name=folder.name.rpartition("-")[0], result=result)
        return found

    def result(self, planned: PlannedStage) -> StageResult | None:
        """The result of a stage with its present configuration, if it is finished."""
        on_disk = self.found().get(planned.folder)
        result = on_disk.result if on_disk else None
        return result if result and result.digest == planned.digest else None

    def product(self, folder: str, result: StageResult) -> Path | None:
        """The path of a finished stage's output, if its kind has one."""
        return None if result.product is None else self.stages / folder / result.product

    def start(self, folder: str, config: str) -> Path:
        """Create a stage's folder, or prepare it for resuming.

        Its configuration is replaced: equal folder names mean equal values in all that matters, but paths may differ.
        """
        path = self.stages / folder
        try:
            path.mkdir(exist_ok=True)
            (path / RESULT_FILE).unlink(missing_ok=True)  # of a result whose output is missing
        except OSError as error:
            raise disk_error(error, path) from error
        write_atomically(path / self.config.name, config.encode())
        return path

    def finish(self, folder: str, result: StageResult) -> None:
        """Mark the stage as finished."""
        self.write_json(self.stages / folder / RESULT_FILE, result)

    def prune(self, stale: Iterable[str]) -> None:
        """Delete stale results. A folder is renamed first, so that a kill leaves no half of it."""
        for name in stale:
            deleted = self.stages / f"{DELETING}{name}"
            with self.lock_stage(name):
                try:
                    (self.stages / name).rename(deleted)
                    shutil.rmtree(deleted)
                except OSError as error:
                    raise disk_error(error, self.stages / name) from error

    def write_json(self, path: Path, data: Any) -> None:
        write_atomically(path, msgspec.json.format(encode(data)) + b"\n")

    def read_state(self) -> dict[str, Any]:
        return read_json(self.state)


PipelineOutcome: TypeAlias = Literal["finished", "interrupted", "failed"]
StageState: TypeAlias = Literal["done", "running", "interrupted", "failed", "started", "due", "left out"]

_INITIAL_STATES: dict[Action, StageState] = {
    "done": "done",
    "resume": "started",
    "run": "due",
    "wait": "due",
    "leave": "left out",
}


class PipelineState:
    """Keeps pipeline.json and summary.json up to date while stages run.

    Args:
        stale: folders with results of other configurations.
    """

    def __init__(self, name: str, plan: Plan, folder: PipelineFolder, *, stale: Sequence[str]) -> None:
        self.name = name
        self._plan, self._folder, self._stale = plan, folder, stale
        self._states = {planned.stage.name: _INITIAL_STATES[planned.action] for planned in plan.stages}
        self._results = {planned.stage.name: planned.result for planned in plan.stages if planned.result}
        self._others: dict[str, StageState] = {}  # of stages that are left out here
        self._ran: list[str] = []  # in this session
        self._running: str | None = None
        self._write("running")

    def stage_started(self, planned: PlannedStage) -> None:
        self._running = planned.stage.name
        self._states[self._running] = "running"
        self._write("running")

    def stage_finished(self, planned: PlannedStage, result: StageResult) -> None:
        name = planned.stage.name
        self._states[name], self._results[name] = "done", result
        if name == self._running:  # not taken from another process
            self._ran.append(name)
        self._running = None
        self._write("running")

    def end(self, outcome: PipelineOutcome, *, time_is_up: bool, error: str = "") -> dict[str, Any]:
        """Write both files for the last time; returns the summary.

        Args:
            error: type and message of what ended a failed pipeline.
        """
        if self._running is not None and outcome != "finished":
            self._states[self._running] = outcome
        return self._write(outcome, time_is_up=time_is_up, error=error)

    def _write(self, outcome: str, *, time_is_up: bool = False, error: str = "") -> dict[str, Any]:
        with self._folder.updating():
            self._take_in_others()
            return self._write_locked(outcome, time_is_up=time_is_up, error=error)

    def _take_in_others(self) -> None:
        """The states of stages that other processes have run since, or run now."""
        before = {each["folder"]: each["state"] for each in self._folder.read_state().get("stages", ())}
        for planned in self._plan.stages:
            name, left_out = planned.stage.name, self._states[planned.stage.name] == "left out"
            if left_out and (result := self._folder.result(planned)):
                self._results[name], self._states[name] = result, "done"
            elif left_out:
                self._others[name] = before.get(f"{self._folder.stages.name}/{planned.folder}", "left out")

    def _shown(self, name: str) -> StageState:
        state = self._states[name]
        return self._others.get(name, state) if state == "left out" else state

    def _write_locked(self, outcome: str, *, time_is_up: bool, error: str) -> dict[str, Any]:
        states, summaries = [], []
        for planned in self._plan.stages:
            stage, result = planned.stage, self._results.get(planned.stage.name)
            folder = f"{self._folder.stages.name}/{planned.folder}"
            named: dict[str, Any] = {"name": stage.name, "kind": stage.kind, "state": self._shown(stage.name)}
            states.append(
                {
                    **named,
                    "digest": planned.digest,
                    "folder": folder,
                    "model": subject(stage.kind, stage.spec),
                    "needs": list(stage.needs),
                    "product": result.product if result else None,
                    "finished": result.finished if result else None,
                }
            )
            summary = {**named, "ran": stage.name in self._ran, "run_dir": folder}
            if result:
                summary |= {"headline": result.headline, "wall_s": result.wall_s, "figures": result.figures}
            summaries.append(summary)
        pipeline = {"name": self.name, "outcome": outcome, "stages": states, "stale": list(self._stale)}
        self._folder.write_json(self._folder.state, pipeline)
        whole = {
            "pipeline": self.name,
            "outcome": outcome,
            "finished": all(state == "done" for state in self._states.values()),
            "interrupted": outcome == "interrupted",
            "time_is_up": time_is_up,
            "wall_s": round(sum(result.wall_s for result in self._results.values()), 3),
            "stages": summaries,
            **({"error": error} if error else {}),
        }
        self._folder.write_json(self._folder.summary, whole)
        return whole
