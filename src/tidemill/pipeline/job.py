"""What a stage is given when it runs, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
from tidemill.jobs.callbacks import Callback
from tidemill.jobs.stopping import StopRequest
from tidemill.pipeline.stage_plan import StageResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A stage to run."""

    name: str
    kind: StageKind
    digest: str
    spec: RunSpec  # with paths in place of references; run.dir is the stage's folder
    earlier: Sequence[StageResult]  # the results of all stages it depends on, in order
    progress: Callable[[str], None]
    callbacks: Sequence[Callback] = ()  # of rl stages
    stop: StopRequest = field(default_factory=StopRequest)  # of stages that train

    @property
    def directory(self) -> Path:
        return self.spec.directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a stage."""

    product: Path | None = None  # its output
    headline: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False  # by the user
    wall_s: float | None = None  # over all sessions, where the stage measures it


RunStage: TypeAlias = Callable[[Job], Outcome]
