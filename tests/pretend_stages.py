"""Stages that take no time: a few steps that can be cut, and an output that records its inputs.

The output contains the stage's seed and the content of its input, so that a stale input is visible in the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidemill.config.pipeline import KINDS, PipelineSpec, StageKind, load_recipe
from tidemill.pipeline.job import Job, Outcome, RunStage
from tidemill.pipeline.stage_plan import Plan, PlannedStage, StageResult

PRODUCT = "model"
STEPS = 3


class PowerCut(BaseException):
    """The process was killed. Not an Exception, so that no handler catches it."""


class Quiet:
    """Implements pipeline.execution.PipelineReporter; records the calls."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.started: list[str] = []
        self.said: list[str] = []

    def plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def begins(self, planned: PlannedStage, number: int, of: int) -> None:
        self.started.append(planned.stage.name)

    def achieved(self, planned: PlannedStage, result: StageResult) -> None:
        self.said.append(f"{planned.stage.name}: {result.headline}")

    def say(self, line: str) -> None:
        self.said.append(line)


class Stages:
    """Runners for every kind, with the steps that they did.

    Args:
        power: called before every step; an exception that it raises ends the process.
    """

    def __init__(self, power: Callable[[], None] = lambda: None) -> None:
        self.power = power
        self.worked: list[tuple[str, int]] = []  # (folder, step), in order
        self.interrupt_at: int | None = None

    @property
    def runners(self) -> Mapping[StageKind, RunStage]:
        return dict.fromkeys(KINDS, self.run)

    def run(self, job: Job) -> Outcome:
        """Some steps, each recorded in the stage's folder as a checkpoint would be; then the output."""
        done = job.directory / "steps"
        for step in range(int(done.read_text()) if done.exists() else 0, STEPS):
            if self.interrupt_at is not None and len(self.worked) >= self.interrupt_at:
                return Outcome(interrupted=True)
            self.power()
            self.worked.append((job.directory.name, step))
            _replace(done, str(step + 1))
        self.power()
        product = job.directory / PRODUCT
        product.mkdir(exist_ok=True)
        self.power()
        _replace(product / "made.json", json.dumps(self.made(job)))
        self.power()
        return Outcome(product=product, headline=f"seed {job.spec.run.seed}", figures={"seed": job.spec.run.seed})

    def made(self, job: Job) -> dict[str, Any]:
        return {"seed": job.spec.run.seed, "from": read(Path(job.spec.model.source))}


def read(source: Path) -> Any:
    """The content of a stage's input: another stage's output, a file's text, or a name."""
    if (source / "made.json").exists():
        return json.loads((source / "made.json").read_text())
    weights = source / "weights"
    return weights.read_text() if weights.exists() else str(source)


def pipeline(folder: Path, text: str, *overrides: str) -> PipelineSpec:
    """The pipeline of a recipe's text, with its directory below `folder`."""
    recipe = folder / "r.toml"
    recipe.write_text(text, encoding="utf-8")
    found = load_recipe([f"@{recipe}", f"--run.dir={folder / 'D'}", *overrides])
    assert isinstance(found, PipelineSpec)
    return found


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
