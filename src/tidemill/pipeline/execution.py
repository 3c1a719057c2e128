"""Running a pipeline: the stages that are due, one after another, each in its folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tidemill.config.explain import derive
from tidemill.config.issues import ConfigError, ConfigIssue, default_task_remark, without_effect
from tidemill.config.keys import dotted
from tidemill.config.load import STAGES
from tidemill.config.pipeline import PipelineSpec, StageKind, StageSpec, subject
from tidemill.config.schema import RunSpec
from tidemill.config.toml import tables_to_toml, to_toml
from tidemill.core.errors import UserError, error_line
from tidemill.core.formatting import counted
from tidemill.jobs.callbacks import Callback
from tidemill.jobs.stopping import StopRequest
from tidemill.models.model_source import exact_models
from tidemill.pipeline.job import Job, Outcome, RunStage
from tidemill.pipeline.pipeline_page import write_page
from tidemill.pipeline.preflight import check_inputs
from tidemill.pipeline.robot_stages import ROBOT_KINDS, robot_stage_size
from tidemill.pipeline.stage_kinds import RUNNERS
from tidemill.pipeline.stage_plan import (
    EVERYTHING,
    Action,
    Choice,
    Plan,
    PlannedStage,
    StageResult,
    contents_of,
    make_plan,
    put,
    stage_issue,
)
from tidemill.pipeline.state import PipelineFolder, PipelineOutcome, PipelineState
from tidemill.runtime.compute import release_memory
from tidemill.telemetry.events import timestamp
from tidemill.telemetry.jsonl import write_atomically

MAX_CHANGED_KEYS = 3  # listed in the plan's table
ACTIONS: dict[Action, str] = {"done": "done", "resume": "resume", "run": "run", "wait": "waits", "leave": "left out"}


def pipeline_toml(pipeline: PipelineSpec) -> str:
    """Every value of every stage as TOML, which parses back to an equal pipeline."""
    stages = []
    for stage in pipeline.stages:
        sections = stage.sections() | {"run": {"seed": stage.spec.run.seed}}
        stages.append({"name": stage.name, "kind": stage.kind, **sections})
    return tables_to_toml({"run": pipeline.run.model_dump(mode="json"), STAGES: stages})


def row_data(plan: Plan) -> list[dict[str, Any]]:
    """The plan for `--json`."""
    return [
        {
            "stage": planned.stage.name,
            "kind": planned.stage.kind,
            "model": subject(planned.stage.kind, planned.stage.spec),
            "inputs": list(planned.stage.needs),
            "action": planned.action,
            "changed": list(planned.changed),
            "digest": planned.digest,
            "folder": planned.folder,
            "size": size(planned.stage),
        }
        for planned in plan.stages
    ]


def size(stage: StageSpec) -> str:
    """The amount of work, as far as the configuration determines it."""
    spec = stage.spec
    if stage.kind == "rl":
        return f"{counted(spec.trainer.steps, 'step')}, {counted(derive(spec).samples, 'sample')}"
    if stage.kind == "eval":
        return f"up to {counted(spec.eval.prompts, 'prompt')}"
    if stage.kind in ("demonstrations", "pairs"):
        samples = counted(spec.data_generation.samples_per_prompt, "sample")
        prompts = f"up to {counted(spec.data_generation.prompts, 'prompt')}"
        return f"{prompts} × {samples}" if stage.kind == "pairs" else prompts
    if stage.kind == "export":
        return spec.export.dtype
    if stage.kind in ROBOT_KINDS:
        return robot_stage_size(stage.kind, spec)
    epochs = spec.supervised.epochs
    return counted(epochs, "epoch") if epochs else counted(spec.trainer.steps, "step")


def action_text(planned: PlannedStage) -> str:
    """The action for the plan's table, with the keys that have changed."""
    text = ACTIONS[planned.action]
    if planned.due and planned.changed:
        # A changed input is named by its stage.
        stages = {f"{dotted(reference.key)}.stage": reference.stage for reference in planned.stage.references}
        names = [stages.get(key) or key.removesuffix(".stage").removesuffix(".content") for key in planned.changed]
        names = list(dict.fromkeys(names))
        more = len(names) - MAX_CHANGED_KEYS
        text += f" ({', '.join(names[:MAX_CHANGED_KEYS])}{f' and {more} more' if more > 0 else ''} changed)"
    return text


def plan_notes(plan: Plan) -> list[str]:
    """Notes on unused sections, keys without effect, rows, and stale results."""
    notes = [*(f"warning: {message}" for message in plan.unused), *plan.remarks]
    if plan.stale:
        notes.append(f"stale, kept: {', '.join(plan.stale)} (another configuration; --prune-stale deletes them)")
    return notes


class PipelineReporter(Protocol):
    """Shows the progress of a pipeline."""

    def plan(self, plan: Plan) -> None: ...

    def begins(self, planned: PlannedStage, number: int, of: int) -> None: ...

    def achieved(self, planned: PlannedStage, result: StageResult) -> None: ...

    def say(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What the caller of `run_pipeline` provides for every stage."""

    name: str  # of the pipeline
    reporter: PipelineReporter
    runners: Mapping[StageKind, RunStage]
    callbacks: Sequence[Callback]
    stop: StopRequest


def plan_pipeline(pipeline: PipelineSpec, *, choice: Choice = EVERYTHING) -> Plan:
    """Plan a run of the pipeline without writing anything.

    Raises:
        UserError: an input is missing or invalid, or `choice` is not possible.
    """
    folder = PipelineFolder(pipeline.directory)
    folder.refuse_single_run()
    pipeline = with_exact_models(pipeline)
    plan = make_plan(pipeline.stages, contents=contents_of(pipeline.stages), found=folder.found(), choice=choice)
    due, unused = [planned.stage for planned in plan.due], list(pipeline.unused)
    remarks = check_inputs(due, pipeline.stages)
    for stage in due:
        if stage.kind == "rl":
            unused += [f"stage {stage.name}: {message}" for message in without_effect(stage.spec)]
            if remark := default_task_remark(stage.spec):
                remarks.append(f"stage {stage.name}: {remark}")
    return replace(plan, unused=tuple(unused), remarks=tuple(remarks))


def with_exact_models(pipeline: PipelineSpec) -> PipelineSpec:
    """The pipeline with the checkpoint of each run directory that a stage names.

    Raises:
        ConfigError: a run has no checkpoint or is of another version.
    """
    stages, issues = list[StageSpec](), list[ConfigIssue]()
    for stage in pipeline.stages:
        try:
            stages.append(replace(stage, spec=exact_models(stage.spec)))
        except UserError as error:
            issues.append(stage_issue(stage, error))
    if issues:
        raise ConfigError(issues)
    return replace(pipeline, stages=tuple(stages))


def run_pipeline(
    pipeline: PipelineSpec,
    *,
    reporter: PipelineReporter,
    choice: Choice = EVERYTHING,
    prune_stale: bool = False,
    callbacks: Sequence[Callback] = (),
    stop: StopRequest | None = None,
    runners: Mapping[StageKind, RunStage] = RUNNERS,
) -> dict[str, Any]:
    """Run or resume a pipeline until it is finished or interrupted; returns its summary.

    Args:
        prune_stale: first delete results of other configurations.
        callbacks: of its rl stages, see `jobs.callbacks`.
        stop: another way to interrupt it. Stages that do not train end first.

    Raises:
        UserError: an error of the input, a stage or the disk. Finished stages are kept.
    """
    pipeline = with_exact_models(pipeline)
    plan, stop = plan_pipeline(pipeline, choice=choice), stop or StopRequest()  # before anything is written
    folder = PipelineFolder.open(pipeline.directory)
    reporter.plan(plan)
    if prune_stale:
        folder.prune(plan.stale)
    with folder.updating():
        write_atomically(folder.config, pipeline_toml(pipeline).encode())
    state = PipelineState(pipeline.run.name, plan, folder, stale=() if prune_stale else plan.stale)
    outcome: PipelineOutcome = "failed"
    failure = ""
    try:
        hours = max(stage.spec.trainer.hours for stage in pipeline.stages)
        with stop.after_hours(hours):
            session = Session(name=state.name, reporter=reporter, runners=runners, callbacks=callbacks, stop=stop)
            outcome = _run_stages(folder, plan, state, session)
    except KeyboardInterrupt:  # in a stage that does not handle it: a resume repeats or continues the stage
        stop.signal, outcome = signal.SIGINT, "interrupted"
    except Exception as error:
        failure = error_line(error)
        raise
    finally:
        summary = state.end(outcome, time_is_up=stop.time_is_up, error=failure)
        write_page(folder)
    return summary


def _run_stages(folder: PipelineFolder, plan: Plan, state: PipelineState, session: Session) -> PipelineOutcome:
    """Run every stage that is due."""
    results = {planned.stage.name: planned.result for planned in plan.stages if planned.result}
    due = plan.due
    for number, planned in enumerate(due, 1):
        if session.stop.requested:
            return "interrupted"
        with folder.lock_stage(planned.folder):
            result = folder.result(planned)  # of another process, since the plan was made
            if result is None:
                session.reporter.begins(planned, number, len(due))
                state.stage_started(planned)
                if (result := _run_stage(folder, plan, planned, results, session)) is None:
                    return "interrupted"
                folder.finish(planned.folder, result)
            results[planned.stage.name] = result
            state.stage_finished(planned, result)
        session.reporter.achieved(planned, result)
        release_memory()  # before the next stage loads its model
    return "finished"


def _run_stage(
    folder: PipelineFolder,
    plan: Plan,
    planned: PlannedStage,
    results: Mapping[str, StageResult],
    session: Session,
) -> StageResult | None:
    """Run one stage; None: it was interrupted."""
    folders = {each.stage.name: each.folder for each in plan.stages}
    needs = {each.stage.name: each.stage.needs for each in plan.stages}
    stage, start_s = planned.stage, time.monotonic()
    needed = list[str]()  # the stages it depends on, directly or not, in the order in which they run
    for earlier in reversed(plan.stages):
        if earlier.stage.name in stage.needs or any(earlier.stage.name in needs[name] for name in needed):
            needed.insert(0, earlier.stage.name)
    products = {name: folder.product(folders[name], results[name]) for name in stage.needs}
    spec = resolved(stage, products, run=session.name, directory=folder.stages / planned.folder)
    directory = folder.start(planned.folder, to_toml(spec))
    job = Job(
        name=stage.name,
        kind=stage.kind,
        digest=planned.digest,
        spec=spec,
        earlier=[results[name] for name in needed if name in results],
        progress=session.reporter.say,
        callbacks=session.callbacks,
        stop=session.stop,
    )
    outcome = session.runners[stage.kind](job)
    if outcome.interrupted:
        return None
    for key, digest in contents_of([stage])[stage.name].items():
        if planned.contents[key] != digest:  # the result would be stored under the digest of the old files
            hint = "run the same command again; it repeats the stage"
            raise UserError("input changed while the stage ran", where=f"{key} of stage {stage.name}", hint=hint)
    return _result(planned, outcome, directory, time.monotonic() - start_s)


def resolved(stage: StageSpec, products: Mapping[str, Path | None], *, run: str, directory: Path) -> RunSpec:
    """The stage's configuration with paths in place of references, and its run name and directory."""
    tree = stage.spec.model_dump(mode="json")
    tree["run"] |= {"name": f"{run}-{stage.name}", "dir": str(directory)}
    for reference in stage.references:
        put(tree, reference.key, str(products[reference.stage]))
    return RunSpec.model_validate(tree)


def _result(planned: PlannedStage, outcome: Outcome, directory: Path, wall_s: float) -> StageResult:
    product = outcome.product
    if product is not None and product.is_relative_to(directory):
        product = product.relative_to(directory)  # the pipeline's directory may be moved
    return StageResult(
        name=planned.stage.name,
        kind=planned.stage.kind,
        digest=planned.digest,
        product=None if product is None else str(product),
        headline=outcome.headline,
        figures=outcome.figures,
        wall_s=round(outcome.wall_s if outcome.wall_s is not None else wall_s, 3),
        finished=timestamp(time.time()),
        values=planned.values,
    )
