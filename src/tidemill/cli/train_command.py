"""`tidemill train`: train a model, or resume a run."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from tidemill.cli.arguments import Items, resumed_items, row_remarks
from tidemill.cli.arguments import dry_run as show_dry_run
from tidemill.cli.output import INTERRUPTED_CODE, DryRun, Json, Result
from tidemill.config.issues import default_task_remark
from tidemill.config.load import split_arguments
from tidemill.config.pipeline import PipelineSpec, load_recipe
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.folders import another_directory
from tidemill.core.formatting import counted, long_duration
from tidemill.pool.build_provider import trace_remarks

if TYPE_CHECKING:
    from tidemill.pipeline.stage_plan import Choice

Only = Annotated[
    str | None,
    Parameter(name="--only", accepts_keys=False, help="Run only this stage of a recipe."),
]
From = Annotated[
    str | None,
    Parameter(name="--from", accepts_keys=False, help="Run this stage of a recipe and later ones."),
]
PruneStale = Annotated[
    bool,
    Parameter(
        name="--prune-stale",
        negative=(),
        help="Delete results of stages that the recipe no longer uses, before running.",
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
    """Train a model, or resume the run in an existing run directory (`--run.dir`, whose recipe may be left out).

    A recipe with stages shows its plan first; finished stages whose configuration and inputs are unchanged are not
    repeated. Ctrl-C ends a run after a checkpoint, with exit code 130; the same command resumes it.
    """
    given = resumed_items(items)
    recipe = load_recipe(given)
    if isinstance(recipe, PipelineSpec):
        return _stages(recipe, only=only, start=start, prune_stale=prune_stale, dry_run=dry_run)
    if only is not None or start is not None or prune_stale:
        where = "--only" if only is not None else "--from" if start is not None else "--prune-stale"
        raise UserError("this recipe has no stages", where=where, hint="omit it, or use a recipe with [[stage]] tables")
    return _one_run(recipe, has_recipe=bool(split_arguments(given).recipes), dry_run=dry_run)


def _stages(recipe: PipelineSpec, *, only: str | None, start: str | None, prune_stale: bool, dry_run: bool) -> Result:
    from tidemill.pipeline.console_reporter import ConsoleReporter
    from tidemill.pipeline.execution import run_pipeline
    from tidemill.pipeline.stage_plan import Choice

    choice = Choice(only=only, start=start)
    if dry_run:
        return _planned_stages(recipe, choice)
    summary = run_pipeline(recipe, reporter=ConsoleReporter(), choice=choice, prune_stale=prune_stale)
    stages = summary["stages"]
    done, ran = sum(stage["state"] == "done" for stage in stages), sum(stage["ran"] for stage in stages)
    word = "interrupted" if summary["interrupted"] else "finished" if ran else "nothing to do"
    width = max(len(stage["name"]) for stage in stages)
    lines = [f"{word}: {done} of {counted(len(stages), 'stage')} done, {ran} of them now"]
    lines += [f"  {stage['name']:<{width}}  {stage.get('headline', stage['state'])}" for stage in stages]
    if summary["interrupted"]:
        lines.append("the same command resumes it")
    lines.append(f"figures and reports: {recipe.directory / 'report.html'}")
    exit_code = INTERRUPTED_CODE if summary["interrupted"] and not summary["time_is_up"] else 0
    return Result(data=summary | {"run_dir": str(recipe.directory)}, text="\n".join(lines), exit_code=exit_code)


def _planned_stages(recipe: PipelineSpec, choice: Choice) -> Result:
    """The plan and the resolved configuration of every stage; nothing is written."""
    from tidemill.pipeline.console_reporter import plan_table
    from tidemill.pipeline.execution import pipeline_toml, plan_notes, plan_pipeline, row_data

    plan = plan_pipeline(recipe, choice=choice)
    data = {
        "plan": row_data(plan),
        "stale": list(plan.stale),
        "unused": list(plan.unused),
        "remarks": list(plan.remarks),
        "config": {
            "run": recipe.run.model_dump(mode="json"),
            "stage": [{"name": stage.name, "kind": stage.kind, **stage.sections()} for stage in recipe.stages],
        },
    }
    shown = io.StringIO()
    Console(file=shown, width=shutil.get_terminal_size().columns).print(plan_table(plan))
    return Result(data=data, text="\n".join([pipeline_toml(recipe), shown.getvalue().rstrip(), *plan_notes(plan)]))


def _one_run(spec: RunSpec, *, has_recipe: bool, dry_run: bool) -> Result:
    if dry_run:
        from tidemill.jobs.placed_run import placed_run
        from tidemill.runtime.memory_check import known_models, memory_remarks

        remarks = memory_remarks(spec, "rl")
        spec, placed = placed_run(spec, known_models(spec, None, fetch=False))
        remarks += [*placed, *trace_remarks(spec.pool), *row_remarks(spec)]
        return show_dry_run(spec, notes=[*filter(None, [default_task_remark(spec)]), *remarks])
    if (spec.directory / "pipeline.json").exists():
        what = "the directory contains a pipeline, but the recipe has no stages"
        raise UserError(what, where=str(spec.directory), hint=another_directory(spec.directory))
    from tidemill.jobs.train import train as run
    from tidemill.planner.forecast.forecast import forecast_at_start

    summary = run(spec, forecast_run=forecast_at_start, refuse_default_task=not has_recipe)
    exit_code = INTERRUPTED_CODE if summary.get("interrupted") and not summary.get("time_is_up") else 0
    return Result(data=summary, text=summary_text(summary, spec.directory), exit_code=exit_code)


def summary_text(summary: dict[str, Any], directory: Path) -> str:
    """A summary in two or three lines: progress, result, location of the report."""
    from tidemill.telemetry.run_data import held_out_changes

    steps, total = summary.get("steps", 0), summary.get("total_steps", summary.get("steps", 0))
    word = "interrupted" if summary.get("interrupted") else "finished"
    word = "stopped by trainer.hours" if summary.get("interrupted") and summary.get("time_is_up") else word
    word = "already finished" if summary.get("already_finished") else word
    lines = [f"{word}: {steps} of {total} steps in {long_duration(summary.get('wall_s') or 0.0)}"]
    measured = summary.get("eval") or {}
    for name, figures in {"held-out": measured, **measured.get("sets", {})}.items():
        if changes := held_out_changes(figures, digits=2, name=name):
            n = ", then ".join(dict.fromkeys(str(figures[when]["n"]) for when in ("before", "after")))
            lines.append(f"{changes} (n = {n})")
    if summary.get("interrupted"):
        lines.append("the same command resumes it")
    lines.append(f"curves and samples: {directory / 'report.html'}")
    return "\n".join(lines)
