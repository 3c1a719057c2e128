"""`tidemill train`: train a model, run the stages of a pipeline, or resume either."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tidemill.cli.arguments import Items
from tidemill.cli.arguments import dry_run as show_dry_run
from tidemill.cli.output import INTERRUPTED_CODE, DryRun, Json, Result, note
from tidemill.config.pipeline import PipelineSpec
from tidemill.config.schema import RunSpec
from tidemill.config.stages import load_recipe
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, duration, duration_in_words
from tidemill.pipeline.execution import Row, pipeline_toml, plan_notes, plan_pipeline, row_data, rows, run_pipeline
from tidemill.pipeline.plan import Choice, Mark, Plan, Planned
from tidemill.pool.build import remarks

Only = Annotated[
    str | None,
    Parameter(name="--only", accepts_keys=False, help="Of a recipe with stages: run this one and no other."),
]
From = Annotated[
    str | None,
    Parameter(name="--from", accepts_keys=False, help="Of a recipe with stages: run this one and those after it."),
]
PruneStale = Annotated[
    bool,
    Parameter(
        name="--prune-stale",
        negative=(),
        help="Of a recipe with stages: delete results that it asks for no more, before anything is run.",
    ),
]


def train(
    *items: Items,
    only: Only = None,
    start: From = None,
    prune_stale: PruneStale = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> Result:
    """Train a model, or resume a run: an existing run directory goes on where it was.

    A recipe with stages shows its plan first; finished stages whose configuration and inputs are unchanged are not
    repeated. Ctrl-C ends a run after a checkpoint, with exit code 130; the same command resumes it.
    """
    recipe = load_recipe(items)
    if isinstance(recipe, PipelineSpec):
        return _stages(recipe, only=only, start=start, prune_stale=prune_stale, dry_run=dry_run)
    if only is not None or start is not None or prune_stale:
        where = "--only" if only is not None else "--from" if start is not None else "--prune-stale"
        raise UserError("this recipe has no stages", where=where, cure="leave it out, or name a recipe with [[stage]]s")
    return _one_run(recipe, dry_run=dry_run)


def _stages(recipe: PipelineSpec, *, only: str | None, start: str | None, prune_stale: bool, dry_run: bool) -> Result:
    from tidemill.pipeline.plan import Choice

    choice = Choice(only=only, start=start)
    if dry_run:
        return dry_run_pipeline(recipe, choice=choice)
    return train_pipeline(recipe, choice=choice, prune_stale=prune_stale)


def _one_run(spec: RunSpec, *, dry_run: bool) -> Result:
    if dry_run:
        return show_dry_run(spec, notes=remarks(spec.pool))
    if (spec.directory / "pipeline.json").exists():
        what = "this directory holds a pipeline, and the recipe has no stages"
        raise UserError(what, where=str(spec.directory), cure="choose another --run.dir")
    from tidemill.planner.forecast.forecast import foretell
    from tidemill.runtime.train import train as run

    summary = run(spec, foretell=foretell)
    exit_code = INTERRUPTED_CODE if summary.get("interrupted") else 0
    return Result(data=summary, text=summary_text(summary, spec.directory), exit_code=exit_code)


def summary_text(summary: dict[str, Any], directory: Path) -> str:
    """Two or three lines: how far, how good, where to look."""
    from tidemill.telemetry.summary import held_out_changes

    steps, total = summary.get("steps", 0), summary.get("total_steps", summary.get("steps", 0))
    word = "interrupted" if summary.get("interrupted") else "finished"
    word = "already finished" if summary.get("already_finished") else word
    lines = [f"{word}: {steps} of {total} steps in {duration_in_words(summary.get('wall_s') or 0.0)}"]
    measured = summary.get("eval") or {}
    if changes := held_out_changes(measured, digits=2):
        n = ", then ".join(dict.fromkeys(str(measured[when]["n"]) for when in ("before", "after")))
        lines.append(f"{changes} (n = {n})")
    if summary.get("interrupted"):
        lines.append("the same command resumes it")
    lines.append(f"curves and samples: {directory / 'report.html'}")
    return "\n".join(lines)


def train_pipeline(pipeline: PipelineSpec, *, choice: Choice, prune_stale: bool) -> Result:
    """Run or go on with a pipeline."""
    summary = run_pipeline(pipeline, teller=OnStandardError(), choice=choice, prune_stale=prune_stale)
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


class OnStandardError:
    """Tells whoever watches; implements pipeline.run.Teller."""

    def plan(self, plan: Plan) -> None:
        console = Console(stderr=True)
        console.print(plan_table(rows(plan)))
        for line in plan_notes(plan):
            console.print(line, markup=False, highlight=False)

    def begins(self, planned: Planned, number: int, of: int) -> None:
        Console(stderr=True).rule(f"[bold]{number} of {of}: {planned.stage.name}[/bold] ({planned.stage.kind})")

    def achieved(self, planned: Planned, mark: Mark) -> None:
        note(f"{planned.stage.name}: {mark.headline}, in {duration(mark.wall_s)}")

    def say(self, line: str) -> None:
        note(line)


def plan_table(shown: Sequence[Row]) -> Table:
    """A line a stage."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for field in fields(Row):
        table.add_column(field.name, overflow="fold", no_wrap=field.name in ("stage", "kind"))
    for row in shown:
        style = "dim" if row.next in ("done", "left out") else ""
        table.add_row(*map(escape, astuple(row)), style=style)
    return table


def pipeline_summary(summary: dict[str, Any], pipeline: PipelineSpec) -> str:
    """What each stage achieved, and where to look."""
    stages = summary["stages"]
    done, ran = sum(stage["state"] == "done" for stage in stages), sum(stage["ran"] for stage in stages)
    word = "interrupted" if summary["interrupted"] else "finished" if ran else "nothing to do"
    width = max(len(stage["name"]) for stage in stages)
    lines = [f"{word}: {done} of {counted(len(stages), 'stage')} done, {ran} of them now"]
    lines += [f"  {stage['name']:<{width}}  {stage.get('headline', stage['state'])}" for stage in stages]
    if summary["interrupted"]:
        lines.append("the same command resumes it")
    return "\n".join([*lines, f"figures and reports: {pipeline.directory / 'report.html'}"])
