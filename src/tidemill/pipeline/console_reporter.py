"""Prints the plan and the progress of a pipeline to standard error."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tidemill.config.pipeline import subject
from tidemill.core.formatting import duration
from tidemill.pipeline.execution import action_text, plan_notes, size
from tidemill.pipeline.stage_plan import Plan, PlannedStage, StageResult


class ConsoleReporter:
    """Implements `pipeline.execution.PipelineReporter`."""

    def plan(self, plan: Plan) -> None:
        console = Console(stderr=True)
        console.print(plan_table(plan))
        for line in plan_notes(plan):
            console.print(line, markup=False, highlight=False)

    def begins(self, planned: PlannedStage, number: int, of: int) -> None:
        Console(stderr=True).rule(f"[bold]{number} of {of}: {planned.stage.name}[/bold] ({planned.stage.kind})")

    def achieved(self, planned: PlannedStage, mark: StageResult) -> None:
        self.say(f"{planned.stage.name}: {mark.headline}, in {duration(mark.wall_s)}")

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def plan_table(plan: Plan) -> Table:
    """One row per stage."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "kind", "model or task", "inputs", "next", "size"):
        table.add_column(name, overflow="fold", no_wrap=name in ("stage", "kind"))
    for planned in plan.stages:
        stage = planned.stage
        cells = (stage.name, stage.kind, subject(stage.kind, stage.spec), ", ".join(stage.needs), action_text(planned))
        table.add_row(*map(escape, (*cells, size(stage))), style="dim" if planned.action in ("done", "leave") else "")
    return table
