"""pipeline.json and summary.json: how far a pipeline is and what its stages achieved, written again at every turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from tidemill.pipeline.folder import PipelineFolder
from tidemill.pipeline.plan import Action, Mark, Plan, Planned

Ending: TypeAlias = Literal["finished", "interrupted", "failed"]
State: TypeAlias = Literal["done", "running", "interrupted", "failed", "begun", "due", "left out"]

_AT_FIRST: dict[Action, State] = {
    "done": "done",
    "resume": "begun",
    "run": "due",
    "wait": "due",
    "leave": "left out",
}


class PipelineStory:
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

    def begun(self, planned: Planned) -> None:
        self._running = planned.stage.name
        self._states[self._running] = "running"
        self._write("running")

    def finished(self, planned: Planned, mark: Mark) -> None:
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

    def _stage(self, planned: Planned) -> dict[str, Any]:
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
