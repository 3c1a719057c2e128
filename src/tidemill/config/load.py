"""From a command line to a validated run: `@recipe.toml ...` composed left to right, then `--section.key value`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tidemill.config.checks import Purpose, contradictions
from tidemill.config.faults import ConfigError, Fault, Location, no_table, split_cure, translate
from tidemill.config.keys import KeyPath, default_kind, is_table, variants
from tidemill.config.layers import (
    STAGES,
    Layer,
    Tree,
    command_line,
    merge,
    recipe_layer,
    split_arguments,
    with_absolute_paths,
    without_value,
)
from tidemill.config.schema import RunSpec
from tidemill.config.toml import parse_toml

ComposedT = TypeVar("ComposedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """A command line read, with what was wrong already."""

    layers: Sequence[Layer]  # the recipes, then the command line
    faults: Sequence[Fault]
    complete: bool  # every recipe could be read

    def composed(self, compose: Callable[[Sequence[Layer]], ComposedT]) -> ComposedT:
        """What `compose` makes of the layers.

        Raises:
            ConfigError: every fault found, those of reading first. With a recipe missing, most of what else is wrong
                would be wrong only for want of it, and is left out.
        """
        if not self.faults:
            return compose(self.layers)
        more: Sequence[Fault] = ()
        if self.complete:
            try:
                compose(self.layers)
            except ConfigError as error:
                more = error.faults
        raise ConfigError([*self.faults, *more])


def load_spec(args: Sequence[str], *, purpose: Purpose = "train") -> RunSpec:
    """The run that `args` describe.

    Recipes come first, from left to right, whatever the order on the command line; overrides go on top. Tables merge,
    arrays and values are replaced, and a changed `task.kind` drops the old kind's keys. Relative input paths (task
    files, a reward's file, a model folder written ./folder) start at the recipe's own folder, or at the working
    directory when given on the command line; run.dir is an output and starts at the working directory in either case.

    Args:
        args: `@file.toml`, `--section.key value`, `--section.key=value`, and bare `--section.flag` for true.
        purpose: what the run is for; training refuses sampling that its loss could not account for.

    Raises:
        ConfigError: every fault found, a line each.
    """
    sources = read_sources(args)
    if has_stages(sources.layers):
        raise ConfigError([_not_one_run(sources.layers)])
    return sources.composed(lambda layers: compose(layers, purpose=purpose))


def read_sources(args: Sequence[str]) -> Sources:
    """The recipes that `args` name, then their overrides.

    Raises:
        ConfigError: an argument that is neither.
    """
    given = split_arguments(args)
    if given.rest:
        raise ConfigError([_stray(item) for item in given.rest])
    layers, faults = [], list[Fault]()
    for recipe in given.recipes:
        try:
            layers.append(recipe_layer(recipe))
        except ConfigError as error:
            faults += error.faults
    layers.append(command_line(given.assignments))
    complete = len(layers) == len(given.recipes) + 1
    return Sources(layers=layers, faults=faults + without_value(given.assignments), complete=complete)


def has_stages(layers: Sequence[Layer]) -> bool:
    """Whether a recipe among them is of a pipeline."""
    return any(STAGES in layer.tree for layer in layers)


def from_toml(text: str, *, source: str = "config.toml", folder: Path | None = None) -> RunSpec:
    """The run a TOML text describes, for example one written by `to_toml`; relative input paths start at `folder`."""
    tree = parse_toml(text, source=source)
    if folder is not None:
        tree = with_absolute_paths(tree, folder)
    return compose([Layer(name=source, tree=tree, text=text)], purpose="read")


def compose(layers: Sequence[Layer], *, purpose: Purpose) -> RunSpec:
    """Merge the layers, later over earlier, and validate the result."""
    tree: Tree = {}
    misplaced: list[Fault] = []
    for layer in layers:
        tree = merge(tree, _tables(layer, layer.tree, misplaced))
    for table in variants():
        if isinstance(tree.get(table[0]), dict):
            tree[table[0]].setdefault("kind", default_kind(table))

    def locate(location: Location) -> str:
        # A missing or derived key is reported where its table was given.
        for size in range(len(location), 0, -1):
            for layer in reversed(layers):
                if found := layer.locate(location[:size]):
                    return found
        return ""

    inconsistent: list[str] = []
    try:
        # JSON, because only there strict types allow an array for a tuple and text for a path.
        document = json.dumps(tree, default=str)
        spec = RunSpec.model_validate_json(document, strict=True, context={"inconsistent": inconsistent})
    except ValidationError as error:
        raise ConfigError([*misplaced, *translate(error, tree, locate)]) from None
    if misplaced:
        raise ConfigError(misplaced)
    if faults := [split_cure(line) for line in inconsistent] + contradictions(spec, purpose):
        raise ConfigError(faults)
    return spec


def _tables(layer: Layer, tree: Tree, misplaced: list[Fault], at: KeyPath = ()) -> Tree:
    """`tree` without the values in place of sections, which a later layer's keys would hide; each is a fault."""
    kept: Tree = {}
    for name, value in tree.items():
        path = (*at, name)
        if not is_table(path):
            kept[name] = value
        elif isinstance(value, dict):
            kept[name] = _tables(layer, value, misplaced, path)
        else:
            misplaced.append(no_table(path, value, layer.locate(path)))
    return kept


def differences(old: RunSpec, new: RunSpec) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) wherever two runs differ; a key only one of them has is None in the other."""
    before, after = flattened(old.model_dump(mode="json")), flattened(new.model_dump(mode="json"))
    names = dict.fromkeys([*before, *after])
    return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]


def flattened(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; arrays stay whole."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _not_one_run(layers: Sequence[Layer]) -> Fault:
    source = next((place for layer in layers if (place := layer.locate((STAGES, 0)))), "")
    cure = "name a recipe without stages, or the run directory of one stage (--checkpoint runs/NAME/stages/STAGE-...)"
    return Fault(key=STAGES, what="a recipe of several stages, and this is for one run", source=source, cure=cure)


def _stray(item: str) -> Fault:
    if item.endswith(".toml") or Path(item).is_file():
        return Fault(key=item, what="a recipe is named with @ before it", cure=f"write @{item}")
    return Fault(key=item, what="unexpected argument", cure="write @recipe.toml or --section.key value")
