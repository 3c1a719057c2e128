"""Recipes with stages: the kinds of stages, the references between them, and loading."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tidemill.config.deploy import DeployConfig
from tidemill.config.issues import ABSENT, ConfigError, ConfigIssue, Purpose, value_at
from tidemill.config.keys import ITEM, KeyPath, did_you_mean, dotted
from tidemill.config.load import PREFIX, STAGES, Layer, Tree, compose, has_stages, override_layers, read_sources
from tidemill.config.schema import RunConfig, RunSpec

StageKind: TypeAlias = Literal[
    "demonstrations",
    "pairs",
    "sft",
    "reward_model",
    "dpo",
    "rl",
    "eval",
    "export",
    "control",
    "clone",
    "optimise",
    "identify",
    "twin",
    "bundle",
]
Product: TypeAlias = Literal[
    "a model",
    "a reward model",
    "demonstrations",
    "preference pairs",
    "prompts",
    "a policy",
    "recorded episodes",
    "robot parameters",
    "a trajectory",
    "a twin report",
    "a bundle",
]
"""What one stage may take from another. No kind outputs prompts."""

REFERENCE_KEYS: dict[KeyPath, tuple[Product, ...]] = {
    ("model", "source"): ("a model",),
    ("critic", "source"): ("a model", "a reward model"),
    ("task", "path"): ("prompts",),
    ("task", "held_out_path"): ("prompts",),
    ("task", "sources", ITEM, "path"): ("prompts",),
    ("data", "path"): (),
    ("data", "held_out_path"): (),
    ("data", "sources", ITEM, "path"): (),
    ("scoring", "rewards", ITEM, "model"): ("a reward model",),
    ("eval", "compare_with"): ("a model",),
    ("eval", "sets", ITEM, "path"): ("prompts",),
    ("robot", "parameters"): ("robot parameters",),
    ("clone", "path"): ("recorded episodes",),
    ("clone", "teacher"): ("a policy",),
    ("identify", "path"): ("recorded episodes",),
    ("twin", "policy"): ("a policy",),
    ("bundle", "policy"): ("a policy",),
    ("bundle", "twin"): ("a twin report",),
}
"""The keys that name a model or file, and the products they accept; (): the data of the kind of stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKindSpec:
    """A row of the table of kinds."""

    sections: tuple[str, ...]  # sections of the configuration that this kind uses
    output: Product | None
    data: Product | None = None  # rows of [data]
    purpose: Purpose = "read"


_SUPERVISED = (
    *("runtime", "run", "model", "data", "env", "ray", "supervised", "optimizer", "trainer", "checkpoint"),
    "telemetry",
)

_CONTROL = ("runtime", "run", "robot", "control", "pool", "fleet", "ray", "trainer", "checkpoint", "telemetry")

KINDS: dict[StageKind, StageKindSpec] = {
    "demonstrations": StageKindSpec(
        sections=("run", "model", "task", "env", "sandbox", "sampling", "data_generation"),
        output="demonstrations",
        purpose="generate",
    ),
    "pairs": StageKindSpec(
        sections=("run", "model", "task", "sandbox", "scoring", "sampling", "engine", "trainer", "data_generation"),
        output="preference pairs",
        purpose="generate",
    ),
    "sft": StageKindSpec(sections=_SUPERVISED, output="a model", data="demonstrations"),
    "reward_model": StageKindSpec(
        sections=(*_SUPERVISED, "reward_model"), output="a reward model", data="preference pairs"
    ),
    "dpo": StageKindSpec(sections=(*_SUPERVISED, "preference"), output="a model", data="preference pairs"),
    "rl": StageKindSpec(
        sections=(
            *("runtime", "run", "model", "task", "env", "sandbox", "scoring", "sampling"),
            *("engine", "pool", "fleet", "ray", "weights", "gateway"),
            *("placement", "reading", "batch", "schedule", "algorithm", "optimizer", "critic", "trainer", "eval"),
            *("checkpoint", "guard", "telemetry", "simulation"),
        ),
        output="a model",
        purpose="train",
    ),
    "eval": StageKindSpec(
        sections=("run", "model", "task", "env", "sandbox", "scoring", "sampling", "engine", "trainer", "eval"),
        output=None,
        purpose="eval",
    ),
    "export": StageKindSpec(sections=("run", "model", "export"), output="a model"),
    "control": StageKindSpec(sections=_CONTROL, output="a policy"),
    "clone": StageKindSpec(sections=(*_CONTROL, "clone"), output="a policy"),
    "optimise": StageKindSpec(sections=("run", "robot", "optimise"), output="a trajectory"),
    "identify": StageKindSpec(sections=("run", "robot", "identify"), output="robot parameters"),
    "twin": StageKindSpec(sections=("runtime", "run", "robot", "pool", "fleet", "ray", "twin"), output="a twin report"),
    "bundle": StageKindSpec(sections=("run", "robot", "bundle"), output="a bundle"),
}


WHOLE = ("run", "deploy")
"""Sections at the top of a recipe with stages that describe all of them together."""
DEPLOY = "deploy"
SHARED_DEPLOY_KEYS: tuple[KeyPath, ...] = (
    *(("target",), ("image",), ("namespace",), ("storage",), ("sweep",), ("serve",)),
    *(("hours",), ("priority_class",), ("osmo", "pool")),
)
"""Keys of [deploy] that describe the job, which [stage.deploy] cannot change for one stage."""


def subject(kind: StageKind, spec: RunSpec) -> str:
    """What a stage works on: a model, or a robot's task or environment."""
    if "model" in KINDS[kind].sections:
        return spec.model.source
    return spec.robot.environment or spec.robot.task


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One `stage:NAME`."""

    key: tuple[str | int, ...]  # its location in the stage's configuration
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage, complete except for the outputs of earlier stages."""

    name: str
    kind: StageKind
    spec: RunSpec  # only the sections of its kind have a meaning
    deploy: DeployConfig | None = None  # [deploy] with [stage.deploy] over it; None: the stage has no such table

    @property
    def references(self) -> tuple[Reference, ...]:
        return tuple(
            Reference(key=key, stage=value.removeprefix(PREFIX))
            for key, value in self.sources()
            if value.startswith(PREFIX)
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the stages whose outputs it uses, each once."""
        return tuple(dict.fromkeys(reference.stage for reference in self.references))

    def sections(self) -> dict[str, Any]:
        """Its configuration as plain data: the sections of its kind, in the schema's order."""
        return _only(self.spec.model_dump(mode="json"), KINDS[self.kind].sections)

    def sources(self) -> list[tuple[tuple[str | int, ...], str]]:
        """(location, value) of every key that names a model or file and is set."""
        sections = _only(self.spec.model_dump(mode="json"), KINDS[self.kind].sections)
        return [found for path in REFERENCE_KEYS for found in _values(sections, path, ())]


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(PREFIX)


def _values(node: Any, path: KeyPath, at: tuple[str | int, ...]) -> list[tuple[tuple[str | int, ...], str]]:
    if not path:
        return [(at, node)] if isinstance(node, str) and node else []
    first, rest = path[0], path[1:]
    if first == ITEM:
        return [found for index, each in enumerate(node) for found in _values(each, rest, (*at, index))]
    return _values(node[first], rest, (*at, first)) if isinstance(node, dict) and first in node else []


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """A recipe with stages, in the order in which they run."""

    run: RunConfig
    stages: tuple[StageSpec, ...]
    deploy: DeployConfig = field(default_factory=DeployConfig)
    unused: tuple[str, ...] = field(default=(), compare=False)  # messages about sections that no stage uses

    @property
    def directory(self) -> Path:
        return self.run.dir or Path("runs") / self.run.name


STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # used in --stage.NAME.key and as a folder name


def load_recipe(args: Sequence[str]) -> RunSpec | PipelineSpec:
    """Load the run or pipeline that `args` describe, as `config.load.load_spec` does with purpose "train".

    Raises:
        ConfigError: every issue found, including circular references and missing inputs of stages.
    """
    return read_sources(args).composed(
        lambda layers: compose_stages(layers) if has_stages(layers) else _single_run(layers, purpose="train")
    )


def load_overridden(
    recipe: str | Path | None, overrides: Mapping[str, Any], *, purpose: Purpose = "train"
) -> RunSpec | PipelineSpec:
    """The run or pipeline of a recipe with overrides given as Python values.

    Args:
        recipe: a file, or the name of a built-in recipe; None for the defaults.
        overrides: values by dotted key, or tables. Relative paths start at the working directory.

    Raises:
        ConfigError: every issue found.
    """
    layers = override_layers(recipe, overrides)
    return compose_stages(layers) if has_stages(layers) else _single_run(layers, purpose=purpose)


def _single_run(layers: Sequence[Layer], *, purpose: Purpose) -> RunSpec:
    """A recipe without stages.

    Raises:
        ConfigError: every issue found; also for rows in [data], which RL would not read. (The configuration of a run of
            another kind has them: the directory of that run is refused where it is opened.)
    """
    spec = compose(layers, purpose=purpose)
    if purpose != "train":
        return spec

    def location(path: KeyPath) -> str:
        return next(filter(None, (layer.locate(path) for layer in reversed(layers))), "")

    def of_a_run(source: str) -> bool:
        return Path(source).with_name("manifest.json").is_file()

    if any("robot" in layer.tree for layer in layers) and not of_a_run(source := location(("robot",))):
        what = "only the stages of a recipe train robots, and this one has none"
        hint = 'add a table [[stage]] with name = "train" and kind = "control"; tidemill recipe show robot has one'
        raise ConfigError([ConfigIssue(key="robot", what=what, source=source, hint=hint)])
    if spec.data.all_sources:
        key = "path" if spec.data.path else "sources"
        source = location(("data", key))
        if not of_a_run(source):
            what = "only stages of kind sft, reward_model and dpo read this"
            hint = f'write task.{key} (of task.kind = "file"), or make the recipe one with [[stage]] tables'
            raise ConfigError([ConfigIssue(key=f"data.{key}", what=what, source=source, hint=hint)])
    return spec


def load_directory(recipe: str | Path | None, overrides: Mapping[str, Any]) -> Path:
    """The run directory of a recipe with overrides; other sections are not read. Raises as `load_overridden`."""
    layers = [replace(layer, tree=_only(layer.tree, ("run",))) for layer in override_layers(recipe, overrides)]
    return compose(layers, purpose="read").directory


def load_stage(kind: StageKind, recipe: str | Path | None, overrides: Mapping[str, Any]) -> RunSpec:
    """One stage as a run of its own: sections of the recipe that its kind does not use are ignored.

    Args:
        recipe, overrides: as for `load_overridden`.

    Raises:
        ConfigError: every issue found; also if the recipe has stages, or an override belongs to another kind.
    """
    layers = override_layers(recipe, overrides)
    if has_stages(layers):
        what, hint = "the recipe has stages, and this function runs a single one", "run it with tidemill.train"
        raise ConfigError([ConfigIssue(key=str(recipe), what=what, hint=hint)])
    if issues := list(_foreign_sections(layers[-1], kind)):
        raise ConfigError(issues)
    return compose(layers, purpose=KINDS[kind].purpose)


def compose_stages(layers: Sequence[Layer]) -> PipelineSpec:
    """Merge and validate every stage.

    From weak to strong: the recipes' top-level sections, the stage's own sections, `--section.key` on the command line,
    `--stage.NAME.section.key`. References between stages are kept when `--section.key` sets the same key.

    Args:
        layers: the recipes, then the command line.

    Raises:
        ConfigError: the issues of all stages.
    """
    recipes, command = layers[:-1], layers[-1]
    issues = list[ConfigIssue]()
    tables: dict[str, list[Layer]] = {}
    for recipe in recipes:
        for layer in _stage_tables(recipe, issues):
            tables.setdefault(layer.stage, []).append(layer)
    overrides = _stage_overrides(command, list(tables), issues)
    stages = []
    for name, own in tables.items():
        try:
            stages.append(_compose_stage(name, own, recipes, command, overrides.get(name)))
        except ConfigError as error:
            issues += error.issues
    kinds = [stage.kind for stage in stages]
    for layer in layers:
        unknown = {name: value for name, value in layer.tree.items() if name not in (*RunSpec.model_fields, STAGES)}
        try:
            compose([replace(layer, tree=unknown)], purpose="read")
        except ConfigError as error:
            issues += error.issues
    if len(stages) == len(tables):  # else an invalid stage may have the section
        for section, users in _unused_sections(command, kinds):
            what = "no stage of this recipe has this section"
            hint = f"leave it out, or add a stage of kind {' or '.join(users)}"
            issues.append(ConfigIssue(key=section, what=what, source=command.name, hint=hint))
    issues += graph_issues(stages, invalid=tables.keys() - {stage.name for stage in stages})
    if issues:
        raise ConfigError(list(dict.fromkeys(issues)))
    whole = compose([replace(layer, tree=_only(layer.tree, WHOLE)) for layer in layers], purpose="read")
    unused = tuple(
        f"{recipe.locate((section,))}: no stage uses [{section}] (only {', '.join(users)})"
        for recipe in recipes
        for section, users in _unused_sections(recipe, kinds)
    )
    return PipelineSpec(run=whole.run, deploy=whole.deploy, stages=tuple(stages), unused=unused)


def _stage_tables(recipe: Layer, issues: list[ConfigIssue]) -> Iterator[Layer]:
    """The stages of a recipe as layers; tables without a valid name go to `issues`."""
    tables = recipe.tree.get(STAGES, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        hint = f'write [[{STAGES}]] and below it name = "...", kind = "..."'
        what, source = "needs an array of tables", recipe.locate((STAGES,))
        issues.append(ConfigIssue(key=STAGES, what=what, source=source, hint=hint))
        return
    if STAGES in recipe.tree and not tables:
        hint = "add a stage, or leave it out"
        issues.append(ConfigIssue(key=STAGES, what="is empty", source=recipe.name, hint=hint))
    names: set[str] = set()
    for index, table in enumerate(tables):
        name, what = table.get("name"), ""
        if name is None:
            what, hint = "missing", 'give the stage a name, such as "sft"'
        elif not isinstance(name, str) or not STAGE_NAME.fullmatch(name):
            what, hint = f"{name!r} is not a valid name", "use letters, digits, - and _"
        elif name in names:
            what, hint = f'two stages have the name "{name}"', "rename one of them"
        if what:
            source = recipe.locate((STAGES, index))
            issues.append(ConfigIssue(key=f"{STAGES}[{index}].name", what=what, source=source, hint=hint))
        else:
            names.add(name)
            yield Layer(name=recipe.name, tree=table, text=recipe.text, at=(STAGES, index), stage=name)


def _stage_overrides(command: Layer, names: Sequence[str], issues: list[ConfigIssue]) -> dict[str, Layer]:
    """The options `--stage.NAME.section.key`, by stage."""
    layers: dict[str, Layer] = {}
    tables = command.tree.get(STAGES, {})
    if not isinstance(tables, dict):
        hint = f"write --{STAGES}.NAME.section.key VALUE"
        issues.append(ConfigIssue(key=f"--{STAGES}", what="needs a key", hint=hint))
        return layers
    for name, table in tables.items():
        option = f"--{STAGES}.{name}"
        if name not in names:
            hint = did_you_mean(name, names) or f"stages: {', '.join(names)}"
            issues.append(ConfigIssue(key=option, what="no stage of that name", hint=hint))
        elif not isinstance(table, dict):
            issues.append(ConfigIssue(key=option, what="needs a key", hint=f"write {option}.section.key VALUE"))
        else:
            layers[name] = replace(command, tree=table, at=(STAGES, name), stage=name)
    return layers


def _compose_stage(
    name: str, tables: Sequence[Layer], recipes: Sequence[Layer], command: Layer, override: Layer | None
) -> StageSpec:
    """Merge and validate one stage. Raises ConfigError: every issue of this stage."""
    own = [*tables, override] if override else list(tables)
    kind = _stage_kind(own)
    row, issues = KINDS[kind], list[ConfigIssue]()
    for layer in own:
        issues += _foreign_sections(_without(layer, DEPLOY), kind)
        issues += _shared_deploy_issues(layer)
        for key in ("dir", "name"):
            if value_at(layer.tree, ("run", key), ABSENT) is not ABSENT:
                what = "belongs to the whole pipeline"
                hint = f"set run.{key} at the top of the recipe; each stage has a subfolder with its name"
                issues.append(ConfigIssue(key=f"run.{key}", what=what, source=layer.locate(("run", key)), hint=hint))
    # The keys outside arrays with which the stage refers to another one.
    references = [path for layer in tables for path in REFERENCE_KEYS if _is_reference(value_at(layer.tree, path))]
    options = {
        section: {key: value for key, value in table.items() if (section, key) not in references}
        if isinstance(table, dict)
        else table
        for section, table in _only(command.tree, row.sections).items()
    }
    settings = [_without(layer, "name", "kind", DEPLOY) for layer in own]
    layers = [
        *(replace(recipe, tree=_only(recipe.tree, row.sections)) for recipe in recipes),
        *settings[: len(tables)],
        replace(command, tree=options),
        *settings[len(tables) :],
        Layer(name=f"stage {name}", tree={"run": {"name": name, "dir": None}}),
    ]
    machines = [*recipes, *own[: len(tables)], command, *own[len(tables) :]]
    deploy: DeployConfig | None = None
    try:
        spec = compose(layers, purpose=row.purpose)
        if any(DEPLOY in layer.tree for layer in own):
            only_deploy = [replace(layer, tree=_only(layer.tree, (DEPLOY,))) for layer in machines]
            deploy = compose(only_deploy, purpose="read").deploy
    except ConfigError as error:
        placed = [issue if issue.source else replace(issue, source=f"stage {name}") for issue in error.issues]
        raise ConfigError([*issues, *placed]) from None
    if row.data and not spec.data.all_sources:
        hint = f"give --{STAGES}.{name}.data.path VALUE"
        issues.append(ConfigIssue(key="data.path", what="missing", source=f"stage {name}", hint=hint))
    if issues:
        raise ConfigError(issues)
    return StageSpec(name=name, kind=kind, spec=spec, deploy=deploy)


def _shared_deploy_issues(layer: Layer) -> Iterator[ConfigIssue]:
    """Keys of [stage.deploy] that all stages share."""
    for key in SHARED_DEPLOY_KEYS:
        path = (DEPLOY, *key)
        if value_at(layer.tree, path, ABSENT) is not ABSENT:
            what, hint = "belongs to the whole job", f"set {dotted(path)} at the top of the recipe"
            yield ConfigIssue(key=dotted(path), what=what, source=layer.locate(path), hint=hint)


def _stage_kind(layers: Sequence[Layer]) -> StageKind:
    """Raises ConfigError: the kind is missing or unknown."""
    layer = next((each for each in reversed(layers) if "kind" in each.tree), layers[0])
    given, choices = layer.tree.get("kind"), ", ".join(f'"{kind}"' for kind in KINDS)
    for kind in KINDS:
        if kind == given:
            return kind
    what, hint = "missing", f"give one of {choices}"
    if given is not None:
        what, hint = f"needs one of {choices}, was given {given!r}", did_you_mean(str(given), KINDS)
    source = layer.locate(("kind",)) or layer.locate(())
    raise ConfigError([ConfigIssue(key=f"{STAGES}.{layer.stage}.kind", what=what, source=source, hint=hint)])


def _foreign_sections(layer: Layer, kind: StageKind) -> Iterator[ConfigIssue]:
    """Sections that the kind does not use."""
    for section in layer.tree:
        if section in RunSpec.model_fields and section not in KINDS[kind].sections:
            users = [other for other, row in KINDS.items() if section in row.sections]
            what = f"a stage of kind {kind} does not have this section"
            hint = f"leave it out ({', '.join(users)} {'have' if len(users) > 1 else 'has'} it)"
            if section in WHOLE:
                hint = f"set [{section}] at the top of the recipe"
            yield ConfigIssue(key=section, what=what, source=layer.locate((section,)), hint=hint)


def _only(tree: Tree, sections: Sequence[str]) -> Tree:
    return {name: value for name, value in tree.items() if name in sections}


def _without(layer: Layer, *keys: str) -> Layer:
    return replace(layer, tree={name: value for name, value in layer.tree.items() if name not in keys})


def _unused_sections(layer: Layer, kinds: Sequence[StageKind]) -> Iterator[tuple[str, list[StageKind]]]:
    """Top-level sections that no stage of these kinds uses, each with the kinds that use it."""
    for section in layer.tree:
        users = [kind for kind, row in KINDS.items() if section in row.sections]
        if section in RunSpec.model_fields and section not in WHOLE and not set(users) & set(kinds):
            yield section, users


def graph_issues(stages: Sequence[StageSpec], *, invalid: Container[str] = ()) -> list[ConfigIssue]:
    """The issues of the references between stages.

    Args:
        invalid: names of stages that failed validation; references to them are not checked.
    """
    if cycle := _cycle({stage.name: stage.needs for stage in stages}):
        what = f"circular references: {' → '.join(cycle)}"
        return [ConfigIssue(key=STAGES, what=what, hint="change the input of one of them")]
    kinds = {stage.name: stage.kind for stage in stages}
    issues = list[ConfigIssue]()
    earlier: list[str] = []
    for stage in stages:
        for reference in stage.references:
            if reference.stage not in invalid:
                issues += _reference_issues(stage, reference, kinds, earlier)
        earlier.append(stage.name)
    return issues


def _reference_issues(
    stage: StageSpec, reference: Reference, kinds: Mapping[str, StageKind], earlier: Sequence[str]
) -> Iterator[ConfigIssue]:
    name = reference.stage
    given = f'"{PREFIX}{name}"'
    accepted = REFERENCE_KEYS[tuple(ITEM if isinstance(part, int) else part for part in reference.key)]
    needed = accepted or (KINDS[stage.kind].data,)
    if name not in kinds:
        what = f"{given} names no stage"
        hint = did_you_mean(name, kinds) or f"stages before it: {', '.join(earlier) or 'none'}"
    elif name not in earlier:
        what = f"{given} is a later stage, and stages run in the recipe's order"
        hint = f"move stage {name} before stage {stage.name}"
    elif (output := KINDS[kinds[name]].output) not in needed:
        what = (
            f"needs {' or '.join(map(str, needed))}, and {given} is of kind {kinds[name]}, which outputs "
            f"{output or 'nothing'}"
        )
        sources = [kind for kind, row in KINDS.items() if row.output in needed]
        hint = f"name a stage of kind {' or '.join(sources)}" if sources else "name a file"
    else:
        return
    yield ConfigIssue(key=f"{STAGES}.{stage.name}.{dotted(reference.key)}", what=what, hint=hint)


def _cycle(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """The names along a cycle of references, the first one again at the end; empty if there is none."""
    visited: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for other in needs.get(path[-1], ()):
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in visited and (found := search([*path, other])):
                return found
        visited.add(path[-1])
        return []

    return next((found for name in needs if (found := search([name]))), [])
