"""From recipe files and command-line overrides to a validated configuration."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tidemill.config.issues import (
    COMMAND_LINE,
    ConfigError,
    ConfigIssue,
    Location,
    Purpose,
    contradictions,
    no_table,
    split_hint,
    translate,
)
from tidemill.config.keys import Key, KeyPath, default_kind, find, is_table, suggest, variants
from tidemill.config.schema import RunSpec
from tidemill.config.toml import line_of, parse_toml

Tree = dict[str, Any]
Assignment = tuple[tuple[str, ...], str | None]
"""A dotted key and its value as text, or None for a bare flag."""

COMMAND_FLAGS = (
    "dry-run",
    "json",
    "debug",
    "help",
    "checkpoint",
    "compare",
    "only",
    "from",
    "prune-stale",
    "html",
)  # the verbs' own, offered for misspelt ones
STAGES = "stage"  # the array of a recipe's stages
PREFIX = "stage:"
"""`stage:NAME` where a model or file is asked for is what the stage of that name gives."""
INPUT_PATHS: tuple[KeyPath, ...] = (
    ("task", "path"),
    ("task", "held_out_path"),
    ("data", "path"),
    ("data", "held_out_path"),
    ("pool", "path"),
    ("simulation", "model"),
    ("simulation", "catalog"),
    ("simulation", "lengths_from"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One source of settings. `text` is the file's, for line numbers; the command line has none."""

    name: str
    tree: Tree
    text: str = ""
    at: Location = ()  # where in the text `tree` begins
    stage: str = ""  # whose own settings these are

    def locate(self, location: Location) -> str:
        """`recipe.toml:3`, `command line`, `recipe.toml:7, stage sft`; empty if this layer does not set it."""
        node: Any = self.tree
        for part in location:
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                return ""
        line = line_of(self.text, (*self.at, *location)) if self.text else None
        place = f"{self.name}:{line}" if line else self.name
        return f"{place}, stage {self.stage}" if self.stage else place


@dataclass(slots=True)
class Arguments:
    """A command line taken apart: recipe files, (path, value text or None) assignments, and all else."""

    recipes: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)

    @property
    def items(self) -> list[str]:
        """Recipes and assignments, as arguments again."""
        options = [f"--{'.'.join(path)}" + ("" if text is None else f"={text}") for path, text in self.assignments]
        return [f"@{recipe}" for recipe in self.recipes] + options


def split_arguments(args: Sequence[str]) -> Arguments:
    """Take apart `@file`, `--key value`, `--key=value` and bare `--flag`; a value may be a negative number."""
    found, waiting = Arguments(), list(args)
    while waiting:
        item = waiting.pop(0)
        if item.startswith("@"):
            found.recipes.append(item[1:])
        elif not item.startswith("--"):
            found.rest.append(item)
        else:
            name, sign, text = item[2:].partition("=")
            path = tuple(name.split("."))
            value = text if sign else None
            if not sign and waiting and _is_value(waiting[0], _key(path)):
                value = waiting.pop(0)
            found.assignments.append((path, value))
    return found


def command_line(assignments: Sequence[Assignment]) -> Layer:
    """The overrides as one layer, so that their order does not matter; relative paths start at the working directory.

    Options without a value are left out; `without_value` finds their faults.
    """
    tree: Tree = {}
    for path, text in assignments:
        key = _key(path)
        if text is None and not _is_flag(path):
            continue
        _put(tree, path, True if text is None else parse_value(text, key))
    return Layer(name=COMMAND_LINE, tree=with_absolute_paths(tree, Path.cwd()))


def _put(tree: Tree, path: KeyPath, value: Any) -> None:
    """Tables merge. A value in place of a section stays, whatever comes before or after it: it is to be refused."""
    node = tree
    for depth, part in enumerate(path[:-1], start=1):
        if part in node and not isinstance(node[part], dict) and _is_table(path[:depth]):
            return
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    if isinstance(value, dict) and _is_table(path):
        for name, below in value.items():
            _put(tree, (*path, name), below)
    else:
        node[path[-1]] = value


def recipe_layer(name: str) -> Layer:
    """A recipe file as a layer; relative paths in it start at its own folder.

    Raises:
        ConfigError: the file is missing, unreadable or not TOML.
    """
    path = Path(name).expanduser()
    try:
        text = path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError([ConfigIssue(key=f"@{name}", what="no such file", hint=nearby_recipes(path))]) from None
    except UnicodeDecodeError:
        raise ConfigError(
            [ConfigIssue(key=f"@{name}", what="not UTF-8 text", hint="save the recipe as UTF-8")]
        ) from None
    except OSError as error:
        what = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise ConfigError([ConfigIssue(key=f"@{name}", what=what, hint="name a readable TOML file")]) from None
    tree = with_absolute_paths(parse_toml(text, source=name), path.parent)
    return Layer(name=name, tree=tree, text=text)


def merge(base: Tree, over: Tree, at: KeyPath = ()) -> Tree:
    """`over` on top of `base`: tables merge key by key, all else is replaced; neither is changed.

    A table whose `kind` changes starts anew: the old kind's keys mean nothing to the new one.
    """
    if at in variants() and "kind" in over and over["kind"] != base.get("kind", default_kind(at)):
        base = {}
    merged = dict(base)
    for name, value in over.items():
        below = base.get(name)
        both_tables = isinstance(value, dict) and isinstance(below, dict)
        merged[name] = merge(below, value, (*at, name)) if both_tables else value  # type: ignore[arg-type]
    return merged


def parse_value(text: str, key: Key | None) -> Any:
    """A command-line value: as TOML where it parses, else as text; text, paths and choices need no quotes.

    `none` unsets a key that may be unset.
    """
    if key and key.optional and text == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return _loose_number(text) if key and key.is_number else text
    value = parsed["value"] if list(parsed) == ["value"] else text
    return text if key and key.accepts_text and not isinstance(value, str) else value


def with_absolute_paths(tree: Tree, folder: Path) -> Tree:
    """Input paths made absolute from `folder`, those of stages too; run.dir is an output and stays relative to the
    working directory."""
    run, scoring, stages = tree.get("run"), tree.get("scoring"), tree.get(STAGES)
    changed = dict(tree)
    if isinstance(stages, list):  # a recipe's
        changed[STAGES] = [with_absolute_paths(each, folder) if isinstance(each, dict) else each for each in stages]
    elif isinstance(stages, dict):  # the command line's, by name
        changed[STAGES] = {
            name: with_absolute_paths(each, folder) if isinstance(each, dict) else each for name, each in stages.items()
        }
    if isinstance(run, dict) and str(run.get("dir", "")).startswith("~"):
        changed["run"] = run | {"dir": str(Path(run["dir"]).expanduser())}
    for section, key in INPUT_PATHS:
        table = changed.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str) and not table[key].startswith(PREFIX):
            changed[section] = table | {key: _absolute(table[key], folder)}
    if isinstance(scoring, dict) and isinstance(scoring.get("rewards"), list):
        changed["scoring"] = scoring | {"rewards": [_with_absolute_files(each, folder) for each in scoring["rewards"]]}
    for section in ("model", "critic"):
        table = changed.get(section)
        if isinstance(table, dict) and str(table.get("source", "")).startswith(("./", "../", "~")):
            changed[section] = table | {"source": _absolute(table["source"], folder)}
    return changed


def nearby_recipes(missing: Path) -> str:
    """The recipe probably meant: the closest names in the folder asked for, in ./recipes and here."""
    folders = dict.fromkeys([missing.parent, Path("recipes"), Path()])
    found = {
        each.stem: each for folder in reversed(folders) if folder.is_dir() for each in sorted(folder.glob("*.toml"))
    }
    close = difflib.get_close_matches(missing.stem, found, 3, 0.5)
    if close:
        return f"did you mean {' or '.join(f'@{found[stem]}' for stem in close)}?"
    if found:
        return f"recipes at hand: {', '.join(f'@{each}' for each in list(found.values())[:6])}"
    return "name an existing TOML file"


def without_value(assignments: Sequence[Assignment]) -> list[ConfigIssue]:
    """The faults of options that lack a value, or are misspelt flags."""
    return [_missing_value(path) for path, text in assignments if text is None and not _is_flag(path)]


def _missing_value(path: KeyPath) -> ConfigIssue:
    option, known = f"--{'.'.join(path)}", _key(path)
    if known:
        return ConfigIssue(key=option, what="needs a value", hint=f"write {option} VALUE ({known.words})")
    flags = difflib.get_close_matches(path[0], COMMAND_FLAGS, 1, 0.7) if len(path) == 1 else []
    meant = flags[0] if flags else suggest(path)
    hint = f"did you mean --{meant}?" if meant else "`tidemill train --help` lists every option"
    return ConfigIssue(key=option, what="unknown option", hint=hint)


def _is_flag(path: Sequence[str]) -> bool:
    key = _key(path)
    return key is not None and key.is_flag


def _key(path: Sequence[str]) -> Key | None:
    """The key an option sets: of the run, or as `stage.NAME.key` of one stage."""
    return find(path[2:] if path[0] == STAGES else path)


def _is_table(path: KeyPath) -> bool:
    own = path[2:] if path[0] == STAGES else path
    return not own or is_table(own)


def _is_value(item: str, key: Key | None) -> bool:
    if key is not None and key.is_flag:
        return item in ("true", "false")
    return not item.startswith("--") and (key is not None or not item.startswith("@"))


def _loose_number(text: str) -> Any:
    """`.5` and `007` are no TOML numbers, and plain enough all the same."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / Path(path).expanduser())  # noqa: PTH100 (no symbolic links resolved)


def _with_absolute_files(reward: Any, folder: Path) -> Any:
    if not isinstance(reward, dict):
        return reward
    changed = dict(reward)
    if str(reward.get("model", "")).startswith(("./", "../", "~")):
        changed["model"] = _absolute(reward["model"], folder)
    if isinstance(reward.get("function"), str):
        file, colon, name = reward["function"].rpartition(":")
        if colon and file.endswith(".py"):
            changed["function"] = f"{_absolute(file, folder)}:{name}"
    return changed


ComposedT = TypeVar("ComposedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """A command line read, with what was wrong already."""

    layers: Sequence[Layer]  # the recipes, then the command line
    faults: Sequence[ConfigIssue]
    complete: bool  # every recipe could be read

    def composed(self, compose: Callable[[Sequence[Layer]], ComposedT]) -> ComposedT:
        """What `compose` makes of the layers.

        Raises:
            ConfigError: every fault found, those of reading first. With a recipe missing, most of what else is wrong
                would be wrong only for want of it, and is left out.
        """
        if not self.faults:
            return compose(self.layers)
        more: Sequence[ConfigIssue] = ()
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
    layers, faults = [], list[ConfigIssue]()
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
    misplaced: list[ConfigIssue] = []
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
    if faults := [split_hint(line) for line in inconsistent] + contradictions(spec, purpose):
        raise ConfigError(faults)
    return spec


def _tables(layer: Layer, tree: Tree, misplaced: list[ConfigIssue], at: KeyPath = ()) -> Tree:
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


def _not_one_run(layers: Sequence[Layer]) -> ConfigIssue:
    source = next((place for layer in layers if (place := layer.locate((STAGES, 0)))), "")
    hint = "name a recipe without stages, or the run directory of one stage (--checkpoint runs/NAME/stages/STAGE-...)"
    return ConfigIssue(key=STAGES, what="a recipe of several stages, and this is for one run", source=source, hint=hint)


def _stray(item: str) -> ConfigIssue:
    if item.endswith(".toml") or Path(item).is_file():
        return ConfigIssue(key=item, what="a recipe is named with @ before it", hint=f"write @{item}")
    return ConfigIssue(key=item, what="unexpected argument", hint="write @recipe.toml or --section.key value")
