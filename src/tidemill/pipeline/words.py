"""A pipeline in words: its configuration written out, and its plan as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidemill.config.derive import derive
from tidemill.config.keys import dotted
from tidemill.config.layers import STAGES
from tidemill.config.pipeline import PipelineSpec, StageSpec
from tidemill.config.toml import tables_to_toml
from tidemill.config.words import counted
from tidemill.pipeline.plan import Action, Plan, Planned

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
        drawn = f" × {counted(spec.making.samples_per_prompt, 'sample')}" if stage.kind == "pairs" else ""
        return f"up to {counted(spec.making.prompts, 'prompt')}{drawn}"
    if stage.kind == "export":
        return spec.export.dtype
    epochs = spec.supervised.epochs
    return counted(epochs, "epoch") if epochs else counted(spec.trainer.steps, "step")


def _next(planned: Planned) -> str:
    words = NEXT[planned.action]
    if planned.due and planned.changed:
        shown = _changes(planned)
        more = len(shown) - SHOWN_CHANGES
        words += f" ({', '.join(shown[:SHOWN_CHANGES])}{f' and {more} more' if more > 0 else ''} changed)"
    return words


def _changes(planned: Planned) -> list[str]:
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
