"""Runs a pipeline: one stage after another, each in its folder."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tidemill.config.derive import derive
from tidemill.config.explain import without_effect
from tidemill.config.keys import dotted
from tidemill.config.load import STAGES
from tidemill.config.pipeline import KINDS, PipelineSpec, StageKind, StageSpec
from tidemill.config.schema import RunSpec
from tidemill.config.toml import tables_to_toml, to_toml
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted
from tidemill.pipeline.pipeline_page import write_page
from tidemill.pipeline.preflight import check_inputs
from tidemill.pipeline.stage_kinds import RUNNERS, Job, Outcome, RunStage
from tidemill.pipeline.stage_plan import (
    EVERYTHING,
    Action,
    Choice,
    Plan,
    PlannedStage,
    StageResult,
    contents_of,
    make_plan,
)
from tidemill.pipeline.state import Ending, PipelineFolder, PipelineState
from tidemill.telemetry.events import timestamp
from tidemill.telemetry.jsonl import write_atomically

SHOWN_CHANGES = 3
NEXT: dict[Action, str] = {"done": "done", "resume": "resume", "run": "run", "wait": "waits", "leave": "left out"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the plan."""

    stage: str
    kind: str
    model: str
    inputs: str
    next: str  # what will happen
    size: str


def pipeline_toml(pipeline: PipelineSpec) -> str:
    """Every value of every stage, written out; reading it back gives an equal pipeline."""
    stages = []
    for stage in pipeline.stages:
        sections = stage.sections()
        sections["run"] = {"seed": stage.spec.run.seed}
        stages.append({"name": stage.name, "kind": stage.kind, **sections})
    return tables_to_toml({"run": pipeline.run.model_dump(mode="json"), STAGES: stages})


def rows(plan: Plan) -> list[Row]:
    return [
        Row(
            stage=planned.stage.name,
            kind=planned.stage.kind,
            model=planned.stage.spec.model.source,
            inputs=", ".join(planned.stage.needs),
            next=_next(planned),
            size=size(planned.stage),
        )
        for planned in plan.stages
    ]


def row_data(plan: Plan) -> list[dict[str, Any]]:
    """The plan for `--json`."""
    return [
        {
            "stage": planned.stage.name,
            "kind": planned.stage.kind,
            "model": planned.stage.spec.model.source,
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
    """How much work it is, where the configuration says."""
    spec = stage.spec
    if stage.kind == "rl":
        derived = derive(spec)
        return f"{counted(spec.trainer.steps, 'step')}, {counted(derived.samples, 'sample')}"
    if stage.kind == "eval":
        return f"up to {counted(spec.eval.prompts, 'prompt')}"
    if stage.kind in ("demonstrations", "pairs"):
        drawn = f" × {counted(spec.data_generation.samples_per_prompt, 'sample')}" if stage.kind == "pairs" else ""
        return f"up to {counted(spec.data_generation.prompts, 'prompt')}{drawn}"
    if stage.kind == "export":
        return spec.export.dtype
    epochs = spec.supervised.epochs
    return counted(epochs, "epoch") if epochs else counted(spec.trainer.steps, "step")


def _next(planned: PlannedStage) -> str:
    words = NEXT[planned.action]
    if planned.due and planned.changed:
        shown = _changes(planned)
        more = len(shown) - SHOWN_CHANGES
        words += f" ({', '.join(shown[:SHOWN_CHANGES])}{f' and {more} more' if more > 0 else ''} changed)"
    return words


def _changes(planned: PlannedStage) -> list[str]:
    """Changed keys, those that take from a stage by that stage's name."""
    stages = {f"{dotted(reference.key)}.stage": reference.stage for reference in planned.stage.references}
    words = [stages.get(key) or key.removesuffix(".stage").removesuffix(".content") for key in planned.changed]
    return list(dict.fromkeys(words))


def plan_notes(plan: Plan) -> list[str]:
    """Lines about settings that no stage has a use for, and results that nothing asks for, if there are any."""
    notes = [f"warning: {words}" for words in plan.unused]
    if plan.stale:
        names = ", ".join(plan.stale)
        notes.append(f"stale, kept: {names} (of another configuration; --prune-stale deletes them)")
    return notes


class PipelineReporter(Protocol):
    """Whoever watches."""

    def plan(self, plan: Plan) -> None: ...

    def begins(self, planned: PlannedStage, number: int, of: int) -> None: ...

    def achieved(self, planned: PlannedStage, mark: StageResult) -> None: ...

    def say(self, line: str) -> None: ...


def plan_pipeline(pipeline: PipelineSpec, *, choice: Choice = EVERYTHING) -> Plan:
    """What running it would do now; nothing is written.

    Raises:
        UserError: an input is missing or faulty, or `choice` cannot be.
    """
    folder = PipelineFolder(pipeline.directory)
    folder.refuse_single_run()
    plan = make_plan(pipeline.stages, contents=contents_of(pipeline.stages), found=folder.found(), choice=choice)
    check_inputs([planned.stage for planned in plan.due], pipeline.stages)
    idle = [f"stage {one.stage.name}: {why}" for one in plan.due for why in _without_effect(one.stage)]
    return replace(plan, unused=(*pipeline.unused, *idle))


def _without_effect(stage: StageSpec) -> list[str]:
    return without_effect(stage.spec) if KINDS[stage.kind].purpose == "train" else []


def run_pipeline(
    pipeline: PipelineSpec,
    *,
    teller: PipelineReporter,
    choice: Choice = EVERYTHING,
    prune_stale: bool = False,
    runners: Mapping[StageKind, RunStage] = RUNNERS,
    unix_time: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """Run or go on with a pipeline until done or interrupted; returns its summary.

    Args:
        prune_stale: delete results that the recipe asks for no more, before anything is run.

    Raises:
        UserError: a fault of the input, a stage or the disk; nothing finished is lost.
    """
    plan = plan_pipeline(pipeline, choice=choice)  # before anything is made
    with PipelineFolder.open(pipeline.directory) as folder:
        teller.plan(plan)
        if prune_stale:
            folder.prune(plan.stale)
        write_atomically(folder.config, pipeline_toml(pipeline).encode())
        story = PipelineState(pipeline.run.name, plan, folder, stale=() if prune_stale else plan.stale)
        ending: Ending = "failed"
        try:
            ending = _run(folder, plan, story, teller, runners, unix_time)
        except KeyboardInterrupt:  # in a stage that does not catch it: what it has is kept, or it is done anew
            ending = "interrupted"
        finally:
            summary = story.end(ending)
            write_page(folder)
    return summary


def _run(
    folder: PipelineFolder,
    plan: Plan,
    story: PipelineState,
    teller: PipelineReporter,
    runners: Mapping[StageKind, RunStage],
    unix_time: Callable[[], float],
) -> Ending:
    """Everything that is due, in order."""
    marks = {planned.stage.name: planned.mark for planned in plan.stages if planned.mark}
    folders = {planned.stage.name: planned.folder for planned in plan.stages}
    due = plan.due
    for number, planned in enumerate(due, 1):
        teller.begins(planned, number, len(due))
        story.begun(planned)
        stage, began_s = planned.stage, time.monotonic()
        products = {name: folder.product(folders[name], marks[name]) for name in stage.needs}
        spec = resolved(stage, products, run=story.name, directory=folder.stages / planned.folder)
        directory = folder.begin(planned.folder, to_toml(spec))
        history = [marks[name] for name in _ancestors(stage, plan) if name in marks]
        job = Job(name=stage.name, kind=stage.kind, digest=planned.digest, spec=spec, earlier=history, say=teller.say)
        outcome = runners[stage.kind](job)
        if outcome.interrupted:
            return "interrupted"
        _refuse_changed_inputs(planned)
        mark = _mark(planned, outcome, directory, time.monotonic() - began_s, timestamp(unix_time()))
        folder.finish(planned.folder, mark)
        marks[stage.name] = mark
        story.finished(planned, mark)
        teller.achieved(planned, mark)
        gc.collect()  # a model lies in reference cycles, and the next stage brings its own
    return "finished"


def resolved(stage: StageSpec, products: Mapping[str, Path | None], *, run: str, directory: Path) -> RunSpec:
    """The stage's configuration with a path in place of every `stage:NAME`, a name and a directory of its own."""
    tree = stage.spec.model_dump(mode="json")
    tree["run"] |= {"name": f"{run}-{stage.name}", "dir": str(directory)}
    for reference in stage.references:
        node: Any = tree
        for part in reference.key[:-1]:
            node = node[part]
        node[reference.key[-1]] = str(products[reference.stage])
    return RunSpec.model_validate(tree)


def _mark(planned: PlannedStage, outcome: Outcome, directory: Path, wall_s: float, finished: str) -> StageResult:
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
        finished=finished,
        values=planned.values,
    )


def _refuse_changed_inputs(planned: PlannedStage) -> None:
    """A result must not stand under the address of files that changed while it was made."""
    now = contents_of([planned.stage])[planned.stage.name]
    for key, digest in now.items():
        if planned.contents[key] != digest:
            raise UserError(
                "this file changed while the stage was running, whose result is of neither form of it",
                where=f"{key} of stage {planned.stage.name}",
                hint="run the same command again; the stage is done anew",
            )


def _ancestors(stage: StageSpec, plan: Plan) -> list[str]:
    """Every stage it is built on, in the order they run."""
    needs = {planned.stage.name: planned.stage.needs for planned in plan.stages}
    wanted, waiting = set[str](), list(stage.needs)
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += needs[name]
    return [name for name in needs if name in wanted]
