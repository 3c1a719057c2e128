"""From the layers of a recipe to its stages.

From weak to strong: the recipes' own sections, what a stage says of itself, the command line's `--section.key`, the
command line's `--stage.NAME.section.key`. What one stage takes from another is the recipe's structure: `--section.key`
goes around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tidemill.config.issues import ConfigError, ConfigIssue
from tidemill.config.keys import KeyPath
from tidemill.config.load import PREFIX, STAGES, Layer, Tree, compose, has_stages, read_sources
from tidemill.config.pipeline import ASKED, KINDS, PipelineSpec, StageKind, StageSpec, did_you_mean, graph_faults
from tidemill.config.schema import RunSpec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # a part of --stage.NAME.key; a folder name besides, as run.name is
OWN_KEYS = ("name", "kind")


def load_recipe(args: Sequence[str]) -> RunSpec | PipelineSpec:
    """The run, or the stages, that `args` describe; as `config.load.load_spec` for the purpose of training.

    Raises:
        ConfigError: every fault found, a line each; a circle of stages or an input that is missing is one of them.
    """
    return read_sources(args).composed(compose_recipe)


def compose_recipe(layers: Sequence[Layer]) -> RunSpec | PipelineSpec:
    """Merge and validate layers of which the last one is the command line."""
    return compose_stages(layers) if has_stages(layers) else compose(layers, purpose="train")


def compose_stages(layers: Sequence[Layer]) -> PipelineSpec:
    """
    Args:
        layers: the recipes, then the command line.

    Raises:
        ConfigError: every fault of every stage.
    """
    recipes, command = layers[:-1], layers[-1]
    faults = list[ConfigIssue]()
    own: dict[str, list[Layer]] = {}
    for recipe in recipes:
        for layer in _tables(recipe, faults):
            own.setdefault(layer.stage, []).append(layer)
    over = _overrides(command, list(own), faults)
    stages = []
    for name, tables in own.items():
        try:
            stages.append(_stage(name, tables, recipes, command, over.get(name)))
        except ConfigError as error:
            faults += error.faults
    kinds = [stage.kind for stage in stages]
    faults += _strangers([*recipes, command])
    if len(stages) == len(own):
        faults += _reaching_nothing(command, kinds)
    faults += graph_faults(stages, faulty=own.keys() - {stage.name for stage in stages})
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    run = compose([replace(layer, tree=_only(layer.tree, ("run",))) for layer in layers], purpose="read").run
    return PipelineSpec(run=run, stages=tuple(stages), unused=tuple(_unused(recipes, kinds)))


def _tables(recipe: Layer, faults: list[ConfigIssue]) -> Iterator[Layer]:
    """A recipe's stages as layers of their own; what has no usable name is a fault."""
    tables = recipe.tree.get(STAGES, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        hint = f'write [[{STAGES}]] and below it name = "...", kind = "..."'
        faults.append(ConfigIssue(key=STAGES, what="is an array of tables", source=recipe.locate((STAGES,)), hint=hint))
        return
    if STAGES in recipe.tree and not tables:
        faults.append(
            ConfigIssue(key=STAGES, what="is empty", source=recipe.name, hint="give at least one, or none at all")
        )
    seen: set[str] = set()
    for index, table in enumerate(tables):
        source, name = recipe.locate((STAGES, index)), table.get("name")
        key = f"{STAGES}[{index}].name"
        if name is None:
            faults.append(
                ConfigIssue(key=key, what="not given", source=source, hint='give the stage a name, such as "sft"')
            )
        elif not isinstance(name, str) or not NAME.fullmatch(name):
            hint = "use letters, digits, - and _; it names a folder"
            faults.append(ConfigIssue(key=key, what=f"{name!r} cannot name a stage", source=source, hint=hint))
        elif name in seen:
            hint = "rename one of them"
            faults.append(ConfigIssue(key=key, what=f'two stages are called "{name}"', source=source, hint=hint))
        else:
            seen.add(name)
            yield Layer(name=recipe.name, tree=table, text=recipe.text, at=(STAGES, index), stage=name)


def _overrides(command: Layer, names: Sequence[str], faults: list[ConfigIssue]) -> dict[str, Layer]:
    """What the command line says of single stages."""
    found: dict[str, Layer] = {}
    tables = command.tree.get(STAGES, {})
    if not isinstance(tables, dict):
        faults.append(
            ConfigIssue(key=f"--{STAGES}", what="sets no key", hint=f"write --{STAGES}.NAME.section.key VALUE")
        )
        return found
    for name, table in tables.items():
        if name not in names:
            hint = did_you_mean(name, names) or f"stages: {', '.join(names)}"
            faults.append(ConfigIssue(key=f"--{STAGES}.{name}", what="no stage of that name", hint=hint))
        elif not isinstance(table, dict):
            hint = f"write --{STAGES}.{name}.section.key VALUE"
            faults.append(ConfigIssue(key=f"--{STAGES}.{name}", what="sets no key", hint=hint))
        else:
            found[name] = replace(command, tree=table, at=(STAGES, name), stage=name)
    return found


def _stage(
    name: str, tables: Sequence[Layer], recipes: Sequence[Layer], command: Layer, over: Layer | None
) -> StageSpec:
    """One stage from all that is said of it.

    Raises:
        ConfigError: every fault of this stage.
    """
    said = [*tables, over] if over else list(tables)
    kind = _kind(said)
    faults = [fault for layer in said for fault in _misplaced(layer, kind)]
    sections = KINDS[kind].sections
    references = _reference_keys(tables)
    layers = [
        *(replace(recipe, tree=_only(recipe.tree, sections)) for recipe in recipes),
        *(replace(layer, tree=_settings(layer.tree)) for layer in tables),
        replace(command, tree=_without(_only(command.tree, sections), references)),
        *([replace(over, tree=_settings(over.tree))] if over else []),
    ]
    run = {"run": {"name": name, "dir": None}}
    layers.append(Layer(name=f"stage {name}", tree=run))
    try:
        spec = compose(layers, purpose=KINDS[kind].purpose)
    except ConfigError as error:
        placed = [fault if fault.source else replace(fault, source=f"stage {name}") for fault in error.faults]
        raise ConfigError([*faults, *placed]) from None
    if missing := _missing(spec, KINDS[kind].required):
        what, hint = "not given, and there is no default", f"give --{STAGES}.{name}.{missing} VALUE"
        faults.append(ConfigIssue(key=missing, what=what, source=f"stage {name}", hint=hint))
    if faults:
        raise ConfigError(faults)
    return StageSpec(name=name, kind=kind, spec=spec)


def _missing(spec: RunSpec, required: KeyPath) -> str:
    """The dotted key that this kind of stage needs and has not; empty if nothing is missing."""
    node: Any = spec
    for part in required:
        node = getattr(node, part)
    return ".".join(required) if required and node is None else ""


def _kind(said: Sequence[Layer]) -> StageKind:
    layer = next((each for each in reversed(said) if "kind" in each.tree), None)
    choices = ", ".join(f'"{kind}"' for kind in KINDS)
    key = f"{STAGES}.{said[0].stage}.kind"
    if layer is None:
        raise ConfigError(
            [ConfigIssue(key=key, what="not given", source=said[0].locate(()), hint=f"give one of {choices}")]
        )
    for kind in KINDS:
        if kind == layer.tree["kind"]:
            return kind
    given = layer.tree["kind"]
    what = f"needs one of {choices}, was given {given!r}"
    raise ConfigError(
        [ConfigIssue(key=key, what=what, source=layer.locate(("kind",)), hint=did_you_mean(str(given), KINDS))]
    )


def _misplaced(layer: Layer, kind: StageKind) -> Iterator[ConfigIssue]:
    """What a stage says that its kind does not know, or that is the pipeline's to say."""
    for section in layer.tree:
        if section in RunSpec.model_fields and section not in KINDS[kind].sections:
            knowing = [other for other, row in KINDS.items() if section in row.sections]
            what = f"a stage of kind {kind} has no such section"
            hint = f"leave it out ({', '.join(knowing)} {'have' if len(knowing) > 1 else 'has'} it)"
            yield ConfigIssue(key=section, what=what, source=layer.locate((section,)), hint=hint)
    run = layer.tree.get("run", {})
    for key in ("dir", "name"):
        if isinstance(run, dict) and key in run:
            what = "belongs to the whole pipeline"
            hint = f"set run.{key} at the top of the recipe; each stage gets a folder of its own name below it"
            yield ConfigIssue(key=f"run.{key}", what=what, source=layer.locate(("run", key)), hint=hint)


def _reference_keys(tables: Sequence[Layer]) -> set[tuple[str, ...]]:
    """Keys outside arrays that these tables take from another stage."""
    found = set()
    for layer in tables:
        for path in ASKED:
            node: Any = layer.tree
            for part in path:
                node = node.get(part) if isinstance(node, dict) else None
            if isinstance(node, str) and node.startswith(PREFIX):
                found.add(path)
    return found


def _without(tree: Tree, keys: set[tuple[str, ...]]) -> Tree:
    return {
        section: {name: value for name, value in table.items() if (section, name) not in keys}
        if isinstance(table, dict)
        else table
        for section, table in tree.items()
    }


def _only(tree: Tree, sections: Sequence[str]) -> Tree:
    return {name: value for name, value in tree.items() if name in sections}


def _settings(tree: Tree) -> Tree:
    return {name: value for name, value in tree.items() if name not in OWN_KEYS}


def _strangers(layers: Sequence[Layer]) -> Iterator[ConfigIssue]:
    """Sections that nothing knows; the stages are composed without them."""
    for layer in layers:
        unknown = {name: value for name, value in layer.tree.items() if name not in (*RunSpec.model_fields, STAGES)}
        if unknown:
            try:
                compose([replace(layer, tree=unknown)], purpose="read")
            except ConfigError as error:
                yield from error.faults


def _reaching_nothing(command: Layer, kinds: Sequence[StageKind]) -> Iterator[ConfigIssue]:
    """An option that no stage could take is a mistake."""
    for section, knowing in _without_a_stage(command, kinds):
        hint = f"leave it out, or add a stage of kind {' or '.join(knowing)}"
        yield ConfigIssue(
            key=section, what="no stage of this recipe has such a section", source=command.name, hint=hint
        )


def _unused(recipes: Sequence[Layer], kinds: Sequence[StageKind]) -> Iterator[str]:
    """A recipe's section may serve other recipes: it is no fault, and told in the plan."""
    for recipe in recipes:
        for section, knowing in _without_a_stage(recipe, kinds):
            place, able = recipe.locate((section,)), ", ".join(knowing)
            yield f"{place}: no stage has a use for [{section}] (kinds that do: {able})"


def _without_a_stage(layer: Layer, kinds: Sequence[StageKind]) -> Iterator[tuple[str, list[StageKind]]]:
    """Top-level sections that no stage of these kinds knows, each with the kinds that would."""
    for section in layer.tree:
        knowing = [kind for kind, row in KINDS.items() if section in row.sections]
        if section in RunSpec.model_fields and section != "run" and not set(knowing) & set(kinds):
            yield section, knowing
