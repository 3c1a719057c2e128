"""`tidemill train` for a recipe with stages: prints the plan and runs the stages."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tidemill.cli.output import INTERRUPTED_CODE, Result, note
from tidemill.config.pipeline import PipelineSpec
from tidemill.core.formatting import counted, duration
from tidemill.pipeline.execution import Row, pipeline_toml, plan_notes, plan_pipeline, row_data, rows, run_pipeline
from tidemill.pipeline.stage_plan import Choice, Plan, PlannedStage, StageResult


def train_pipeline(pipeline: PipelineSpec, *, choice: Choice, prune_stale: bool) -> Result:
    """Run or resume a pipeline."""
    summary = run_pipeline(pipeline, reporter=ConsoleReporter(), choice=choice, prune_stale=prune_stale)
    exit_code = INTERRUPTED_CODE if summary["interrupted"] else 0
    data = summary | {"run_dir": str(pipeline.directory)}
    return Result(data=data, text=pipeline_summary(summary, pipeline), exit_code=exit_code)


def dry_run_pipeline(pipeline: PipelineSpec, *, choice: Choice) -> Result:
    """The plan and the resolved configuration of every stage; nothing is written."""
    plan = plan_pipeline(pipeline, choice=choice)
    data = {
        "plan": row_data(plan),
        "stale": list(plan.stale),
        "unused": list(plan.unused),
        "config": {
            "run": pipeline.run.model_dump(mode="json"),
            "stage": [{"name": stage.name, "kind": stage.kind, **stage.sections()} for stage in pipeline.stages],
        },
    }
    shown = io.StringIO()
    Console(file=shown, width=shutil.get_terminal_size().columns).print(plan_table(rows(plan)))
    text = "\n".join([pipeline_toml(pipeline), shown.getvalue().rstrip(), *plan_notes(plan)])
    return Result(data=data, text=text)


class ConsoleReporter:
    """Prints progress to standard error; implements `pipeline.execution.PipelineReporter`."""

    def plan(self, plan: Plan) -> None:
        console = Console(stderr=True)
        console.print(plan_table(rows(plan)))
        for line in plan_notes(plan):
            console.print(line, markup=False, highlight=False)

    def begins(self, planned: PlannedStage, number: int, of: int) -> None:
        Console(stderr=True).rule(f"[bold]{number} of {of}: {planned.stage.name}[/bold] ({planned.stage.kind})")

    def achieved(self, planned: PlannedStage, mark: StageResult) -> None:
        note(f"{planned.stage.name}: {mark.headline}, in {duration(mark.wall_s)}")

    def say(self, line: str) -> None:
        note(line)


def plan_table(shown: Sequence[Row]) -> Table:
    """One row per stage."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for field in fields(Row):
        table.add_column(field.name, overflow="fold", no_wrap=field.name in ("stage", "kind"))
    for row in shown:
        style = "dim" if row.next in ("done", "left out") else ""
        table.add_row(*map(escape, astuple(row)), style=style)
    return table


def pipeline_summary(summary: dict[str, Any], pipeline: PipelineSpec) -> str:
    """The result of each stage, and the location of the report."""
    stages = summary["stages"]
    done, ran = sum(stage["state"] == "done" for stage in stages), sum(stage["ran"] for stage in stages)
    word = "interrupted" if summary["interrupted"] else "finished" if ran else "nothing to do"
    width = max(len(stage["name"]) for stage in stages)
    lines = [f"{word}: {done} of {counted(len(stages), 'stage')} done, {ran} of them now"]
    lines += [f"  {stage['name']:<{width}}  {stage.get('headline', stage['state'])}" for stage in stages]
    if summary["interrupted"]:
        lines.append("the same command resumes it")
    return "\n".join([*lines, f"figures and reports: {pipeline.directory / 'report.html'}"])
