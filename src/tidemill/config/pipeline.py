"""The stages of a recipe: kinds, sections, inputs and outputs, and the graph between them."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tidemill.config.issues import ConfigIssue, Purpose
from tidemill.config.keys import ITEM, KeyPath, dotted
from tidemill.config.load import PREFIX, STAGES
from tidemill.config.schema import RunConfig, RunSpec

StageKind: TypeAlias = Literal["demonstrations", "pairs", "sft", "reward_model", "dpo", "rl", "eval", "export"]
Product: TypeAlias = Literal["a model", "a reward model", "demonstrations", "preference pairs", "prompts"]
"""What one stage may take from another. (No kind gives prompts.)"""

ASKED: dict[KeyPath, Product | None] = {
    ("model", "source"): "a model",
    ("critic", "source"): "a model",
    ("task", "path"): "prompts",
    ("task", "held_out_path"): "prompts",
    ("data", "path"): None,
    ("data", "held_out_path"): None,
    ("scoring", "rewards", ITEM, "model"): "a reward model",
    ("eval", "compare_with"): "a model",
}
"""The keys that name a model or file, and which; None: what the kind of stage learns from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKindSpec:
    """A row of the table of kinds."""

    sections: tuple[str, ...]  # top-level keys of a run that mean something to it
    gives: Product | None
    learns_from: Product | None = None  # rows of [data]
    purpose: Purpose = "read"
    required: KeyPath = ()  # a key without a default that works for it
    # Keys, or "section.", that do not change what it gives; beside NEUTRAL. One that is forgotten here repeats a stage
    # without need, one too many gives a stale result. Of a kind that trains, a resume must allow their change.
    neutral: tuple[str, ...] = ()


NEUTRAL = ("run.dir", "run.name", "trainer.threads", "checkpoint.keep_last", "telemetry.")
"""Of every kind: where things are put, how many are kept, how fast it goes and what is told of it."""
_SCORING = ("engine.tick_s", "scoring.concurrency", "scoring.timeout_s")
_TRAINING = ("scoring.truncated", "trainer.steps", "trainer.logits_budget_mb", "trainer.activation_checkpointing")
"""In sections that say how answers are computed and judged, too: of no consequence where nothing is trained."""
_SUPERVISED = ("run", "model", "data", "supervised", "optimizer", "trainer", "checkpoint", "telemetry")

KINDS: dict[StageKind, StageKindSpec] = {
    "demonstrations": StageKindSpec(
        sections=("run", "model", "task", "sampling", "data_generation"),
        gives="demonstrations",
        purpose="generate",
        # Nothing is drawn: the model gives its tokenizer, `sampling` what ends an answer.
        neutral=(
            *("model.lora.", "sampling.max_new_tokens", "sampling.temperature", "sampling.top_k", "sampling.top_p"),
            *("data_generation.samples_per_prompt", "data_generation.pairs_per_prompt"),
        ),
    ),
    "pairs": StageKindSpec(
        sections=("run", "model", "task", "scoring", "sampling", "engine", "trainer", "data_generation"),
        gives="preference pairs",
        purpose="generate",
        neutral=(*_SCORING, *_TRAINING),
    ),
    # Supervised stages may give their best checkpoint: how often one is written is no matter of taste there.
    "sft": StageKindSpec(
        sections=_SUPERVISED, gives="a model", learns_from="demonstrations", required=("data", "path")
    ),
    "reward_model": StageKindSpec(
        sections=(*_SUPERVISED, "reward_model"),
        gives="a reward model",
        learns_from="preference pairs",
        required=("data", "path"),
    ),
    "dpo": StageKindSpec(
        sections=(*_SUPERVISED, "preference"),
        gives="a model",
        learns_from="preference pairs",
        required=("data", "path"),
    ),
    "rl": StageKindSpec(
        sections=(
            *("runtime", "run", "model", "task", "scoring", "sampling", "engine", "pool", "fleet", "ray"),
            *("placement", "reading", "batch", "schedule", "algorithm", "optimizer", "critic", "trainer", "eval"),
            *("checkpoint", "telemetry", "simulation"),
        ),
        gives="a model",
        purpose="train",
        neutral=(
            *(*_SCORING, "eval.", "checkpoint.", "runtime", "pool.", "fleet.", "ray.", "placement.", "reading."),
            "simulation.",
        ),
    ),
    "eval": StageKindSpec(
        sections=("run", "model", "task", "scoring", "sampling", "engine", "trainer", "eval"),
        gives=None,
        purpose="eval",
        neutral=(*_SCORING, *_TRAINING, "eval.every_steps"),
    ),
    "export": StageKindSpec(
        sections=("run", "model", "export"),
        gives="a model",
        neutral=("run.seed", "model.lora.", "model.chat_template"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One `stage:NAME`."""

    key: tuple[str | int, ...]  # where it stands in the stage's configuration
    stage: str  # whose product is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage, fully resolved but for what earlier stages will give."""

    name: str
    kind: StageKind
    spec: RunSpec  # only the sections its kind knows mean anything

    @property
    def references(self) -> tuple[Reference, ...]:
        return tuple(
            Reference(key=key, stage=value.removeprefix(PREFIX))
            for key, value in asked_for(self.spec, self.kind)
            if value.startswith(PREFIX)
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the stages it takes something from, each once."""
        return tuple(dict.fromkeys(reference.stage for reference in self.references))

    def sections(self) -> dict[str, Any]:
        """Its configuration as plain data: the sections its kind knows, in the schema's order."""
        return known_sections(self.spec.model_dump(mode="json"), self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """A recipe with stages, in the order they run."""

    run: RunConfig
    stages: tuple[StageSpec, ...]
    unused: tuple[str, ...] = field(default=(), compare=False)  # in words: sections that no stage has a use for

    @property
    def directory(self) -> Path:
        return self.run.dir or Path("runs") / self.run.name


def known_sections(tree: dict[str, Any], kind: StageKind) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name in KINDS[kind].sections}


def asked_for(spec: RunSpec, kind: StageKind) -> list[tuple[tuple[str | int, ...], str]]:
    """(location, value) of every key that names a model or file, in this kind's sections; unset ones left out."""
    sections = known_sections(spec.model_dump(mode="json"), kind)
    return [found for path in ASKED for found in _values(sections, path, ())]


def _values(node: Any, path: KeyPath, at: tuple[str | int, ...]) -> list[tuple[tuple[str | int, ...], str]]:
    if not path:
        return [(at, node)] if isinstance(node, str) and node else []
    first, rest = path[0], path[1:]
    if first == ITEM:
        return [found for index, each in enumerate(node) for found in _values(each, rest, (*at, index))]
    return _values(node[first], rest, (*at, first)) if isinstance(node, dict) and first in node else []


def graph_faults(stages: Sequence[StageSpec], *, faulty: Container[str] = ()) -> list[ConfigIssue]:
    """What is wrong with who takes what from whom.

    Args:
        faulty: names of further stages, of which nothing else is known.
    """
    kinds = {stage.name: stage.kind for stage in stages}
    faults = list[ConfigIssue]()
    if circle := _circle({stage.name: stage.needs for stage in stages}):
        what = f"the stages {' → '.join(circle)} wait for one another"
        return [ConfigIssue(key=STAGES, what=what, hint="let one of them take its input from elsewhere")]
    earlier: list[str] = []
    for stage in stages:
        for reference in (each for each in stage.references if each.stage not in faulty):
            faults += _reference_faults(stage, reference, kinds, earlier)
        earlier.append(stage.name)
    return faults


def _reference_faults(
    stage: StageSpec, reference: Reference, kinds: Mapping[str, StageKind], earlier: Sequence[str]
) -> list[ConfigIssue]:
    name = reference.stage
    given = f"{PREFIX}{name}"
    key = f"{STAGES}.{stage.name}.{dotted(reference.key)}"
    if name not in kinds:
        hint = did_you_mean(name, kinds) or f"stages before it: {', '.join(earlier) or 'none'}"
        return [ConfigIssue(key=key, what=f'"{given}" names no stage', hint=hint)]
    if name not in earlier:
        what = f'"{given}" comes later in the recipe, and stages run in its order'
        return [ConfigIssue(key=key, what=what, hint=f"move stage {name} before stage {stage.name}")]
    asked = ASKED[tuple(ITEM if isinstance(part, int) else part for part in reference.key)]
    wanted = asked or KINDS[stage.kind].learns_from
    gives = KINDS[kinds[name]].gives
    if gives == wanted:
        return []
    what = f'asks for {wanted}, and "{given}", a stage of kind {kinds[name]}, gives {gives or "none"}'
    able = [kind for kind, row in KINDS.items() if row.gives == wanted]
    hint = f"name a stage of kind {' or '.join(able)}" if able else "name a file"
    return [ConfigIssue(key=key, what=what, hint=hint)]


def _circle(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of stages that need one another, the first one again at the end; empty if there are none."""
    settled: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for other in needs.get(path[-1], ()):
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in settled and (found := search([*path, other])):
                return found
        settled.add(path[-1])
        return []

    return next((found for name in needs if (found := search([name]))), [])


def did_you_mean(given: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(names), 1, 0.6)
    return f"did you mean {close[0]}?" if close else ""
