"""A pipeline's directory, pipeline.json and summary.json.

config.toml    every stage, every value explicit       stages/NAME-DIGEST/            a run directory each
pipeline.json  what is finished, begun and due         stages/NAME-DIGEST/stage.json  written last: it is finished
summary.json   figures of every stage                  report.html                    the figures, and links
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.records import decode_json
from tidemill.pipeline.stage_plan import Action, FoundStage, Plan, PlannedStage, StageResult
from tidemill.telemetry.jsonl import disk_error, encode, write_atomically
from tidemill.telemetry.run_dir import LockedDirectory, RunDirectory, read_json

MARK = "stage.json"
DOOMED = ".deleting-"


class PipelineFolder(LockedDirectory):
    """`PipelineFolder(path)` is for reading; `PipelineFolder.open(path)` creates and locks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stages = path / "stages"
        self.config = path / "config.toml"
        self.state = path / "pipeline.json"
        self.summary = path / "summary.json"
        self.report = path / "report.html"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the directory if needed, lock it for this process, and remove what a kill left half-deleted.

        Raises:
            UserError: it cannot be written, holds a single run, or another process works on it.
        """
        folder = cls(path)
        folder.refuse_single_run()
        try:
            folder.stages.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            hint = "choose another --run.dir or move the file away"
            raise UserError("a file stands where a directory should be", where=str(path), hint=hint) from error
        except OSError as error:
            raise disk_error(error, path) from error
        folder.acquire(lambda: "another process is working on this pipeline")
        for doomed in folder.stages.glob(f"{DOOMED}*"):
            shutil.rmtree(doomed, ignore_errors=True)
        return folder

    def refuse_single_run(self) -> None:
        """Raises UserError where a run without stages has its directory."""
        if RunDirectory(self.path).manifest.exists():
            what = "this directory holds a single run, and the recipe has stages"
            raise UserError(what, where=str(self.path), hint="choose another --run.dir")

    def found(self) -> dict[str, FoundStage]:
        """Every stage's folder there is, whether of this recipe or an earlier form of it."""
        if not self.stages.is_dir():
            return {}
        folders = (each for each in sorted(self.stages.iterdir()) if each.is_dir() and not each.name.startswith("."))
        return {each.name: FoundStage(name=each.name.rpartition("-")[0], mark=self._whole(each)) for each in folders}

    def product(self, folder: str, mark: StageResult) -> Path | None:
        """Where what a finished stage gives lies; None if it gives nothing."""
        return None if mark.product is None else self.stages / folder / mark.product

    def _whole(self, folder: Path) -> StageResult | None:
        """The mark of a finished stage whose product is still there."""
        try:
            mark = decode_json((folder / MARK).read_bytes(), StageResult)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        product = self.product(folder.name, mark)
        return mark if product is None or product.exists() else None

    def begin(self, folder: str, config: str) -> Path:
        """A stage's folder, ready to be begun or gone on with.

        Its stored configuration is replaced: the folder's name says that it is the same in all that matters, and the
        paths in it may have changed.
        """
        path = self.stages / folder
        try:
            path.mkdir(exist_ok=True)
            (path / MARK).unlink(missing_ok=True)  # of a result whose product is gone
        except OSError as error:
            raise disk_error(error, path) from error
        write_atomically(path / RunDirectory(path).config.name, config.encode())
        return path

    def finish(self, folder: str, mark: StageResult) -> None:
        """From now on the stage is finished."""
        write_atomically(self.stages / folder / MARK, msgspec.json.format(encode(mark)) + b"\n")

    def prune(self, stale: Iterable[str]) -> None:
        """Delete results that nothing asks for any more, each out of sight first."""
        for name in stale:
            doomed = self.stages / f"{DOOMED}{name}"
            try:
                (self.stages / name).rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                raise disk_error(error, self.stages / name) from error

    def write(self, path: Path, data: dict[str, Any]) -> None:
        write_atomically(path, msgspec.json.format(encode(data)) + b"\n")

    def read_state(self) -> dict[str, Any]:
        return read_json(self.state)


Ending: TypeAlias = Literal["finished", "interrupted", "failed"]
State: TypeAlias = Literal["done", "running", "interrupted", "failed", "begun", "due", "left out"]

_AT_FIRST: dict[Action, State] = {
    "done": "done",
    "resume": "begun",
    "run": "due",
    "wait": "due",
    "leave": "left out",
}


class PipelineState:
    """
    Args:
        stale: folders of results that the recipe asks for no more.
    """

    def __init__(self, name: str, plan: Plan, folder: PipelineFolder, *, stale: Sequence[str]) -> None:
        self.name = name
        self._plan, self._folder, self._stale = plan, folder, stale
        self._states = {planned.stage.name: _AT_FIRST[planned.action] for planned in plan.stages}
        self._marks = {planned.stage.name: planned.mark for planned in plan.stages if planned.mark}
        self._ran: list[str] = []  # in this session
        self._running: str | None = None
        self._write("running")

    def begun(self, planned: PlannedStage) -> None:
        self._running = planned.stage.name
        self._states[self._running] = "running"
        self._write("running")

    def finished(self, planned: PlannedStage, mark: StageResult) -> None:
        name, self._running = planned.stage.name, None
        self._states[name], self._marks[name] = "done", mark
        self._ran.append(name)
        self._write("running")

    def end(self, ending: Ending) -> dict[str, Any]:
        """Write everything a last time; returns the summary."""
        if self._running is not None and ending != "finished":
            self._states[self._running] = ending
        return self._write(ending)

    def _write(self, outcome: str) -> dict[str, Any]:
        state = {"name": self.name, "outcome": outcome, "stages": list(map(self._stage, self._plan.stages))}
        self._folder.write(self._folder.state, state | {"stale": list(self._stale)})
        summary = self._summary(outcome)
        self._folder.write(self._folder.summary, summary)
        return summary

    def _stage(self, planned: PlannedStage) -> dict[str, Any]:
        stage, mark = planned.stage, self._marks.get(planned.stage.name)
        return {
            "name": stage.name,
            "kind": stage.kind,
            "state": self._states[stage.name],
            "digest": planned.digest,
            "folder": f"{self._folder.stages.name}/{planned.folder}",
            "model": stage.spec.model.source,
            "needs": list(stage.needs),
            "product": mark.product if mark else None,
            "finished": mark.finished if mark else None,
        }

    def _summary(self, outcome: str) -> dict[str, Any]:
        stages = []
        for planned in self._plan.stages:
            name, mark = planned.stage.name, self._marks.get(planned.stage.name)
            told = {"name": name, "kind": planned.stage.kind, "state": self._states[name], "ran": name in self._ran}
            told["run_dir"] = f"{self._folder.stages.name}/{planned.folder}"
            if mark:
                told |= {"headline": mark.headline, "wall_s": mark.wall_s, "figures": mark.figures}
            stages.append(told)
        finished = all(state == "done" for state in self._states.values())
        return {
            "pipeline": self.name,
            "outcome": outcome,
            "finished": finished,
            "interrupted": outcome == "interrupted",
            "wall_s": round(sum(mark.wall_s for mark in self._marks.values()), 3),
            "stages": stages,
        }
