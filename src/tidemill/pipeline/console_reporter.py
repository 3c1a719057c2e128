"""Prints the plan and the progress of a pipeline to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, fields

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tidemill.core.formatting import duration
from tidemill.pipeline.execution import Row, plan_notes, rows
from tidemill.pipeline.stage_plan import Plan, PlannedStage, StageResult


class ConsoleReporter:
    """Implements `pipeline.execution.PipelineReporter`."""

    def plan(self, plan: Plan) -> None:
        console = Console(stderr=True)
        console.print(plan_table(rows(plan)))
        for line in plan_notes(plan):
            console.print(line, markup=False, highlight=False)

    def begins(self, planned: PlannedStage, number: int, of: int) -> None:
        Console(stderr=True).rule(f"[bold]{number} of {of}: {planned.stage.name}[/bold] ({planned.stage.kind})")

    def achieved(self, planned: PlannedStage, mark: StageResult) -> None:
        self.say(f"{planned.stage.name}: {mark.headline}, in {duration(mark.wall_s)}")

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def plan_table(shown: Sequence[Row]) -> Table:
    """One row per stage."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for field in fields(Row):
        table.add_column(field.name, overflow="fold", no_wrap=field.name in ("stage", "kind"))
    for row in shown:
        style = "dim" if row.next in ("done", "left out") else ""
        table.add_row(*map(escape, astuple(row)), style=style)
    return table
