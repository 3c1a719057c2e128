"""`tidemill train` for a recipe with stages."""

from __future__ import annotations

import io
import shutil
from typing import Any

from rich.console import Console

from tidemill.cli.output import INTERRUPTED_CODE, Result
from tidemill.config.pipeline import PipelineSpec
from tidemill.core.formatting import counted
from tidemill.pipeline.console_reporter import ConsoleReporter, plan_table
from tidemill.pipeline.execution import pipeline_toml, plan_notes, plan_pipeline, row_data, run_pipeline
from tidemill.pipeline.stage_plan import Choice


def train_pipeline(pipeline: PipelineSpec, *, choice: Choice, prune_stale: bool) -> Result:
    """Run or resume a pipeline."""
    summary = run_pipeline(pipeline, reporter=ConsoleReporter(), choice=choice, prune_stale=prune_stale)
    exit_code = INTERRUPTED_CODE if summary["interrupted"] and not summary["time_is_up"] else 0
    data = summary | {"run_dir": str(pipeline.directory)}
    return Result(data=data, text=pipeline_summary(summary, pipeline), exit_code=exit_code)


def dry_run_pipeline(pipeline: PipelineSpec, *, choice: Choice) -> Result:
    """The plan and the resolved configuration of every stage; nothing is written."""
    plan = plan_pipeline(pipeline, choice=choice)
    data = {
        "plan": row_data(plan),
        "stale": list(plan.stale),
        "unused": list(plan.unused),
        "remarks": list(plan.remarks),
        "config": {
            "run": pipeline.run.model_dump(mode="json"),
            "stage": [{"name": stage.name, "kind": stage.kind, **stage.sections()} for stage in pipeline.stages],
        },
    }
    shown = io.StringIO()
    Console(file=shown, width=shutil.get_terminal_size().columns).print(plan_table(plan))
    text = "\n".join([pipeline_toml(pipeline), shown.getvalue().rstrip(), *plan_notes(plan)])
    return Result(data=data, text=text)


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
