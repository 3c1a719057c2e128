"""Loading a run: recipe files and command-line overrides as layers, merged and validated."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tidemill.config.addresses import HUB, address_hint
from tidemill.config.functions import FUNCTION_KEYS
from tidemill.config.issues import (
    ABSENT,
    COMMAND_LINE,
    ConfigError,
    ConfigIssue,
    Location,
    Purpose,
    foreign_hint,
    issues_from,
    purpose_issues,
    split_hint,
    value_at,
    value_for_section,
)
from tidemill.config.keys import Key, KeyPath, default_kind, find, flattened, is_table, key_hint, suggest, variants
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.config.schema import RunSpec
from tidemill.config.toml import line_of, parse_toml

Tree = dict[str, Any]
Assignment = tuple[tuple[str, ...], str | None]
"""A dotted key and its value as text; None for an option without a value."""

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
)  # options of the commands, suggested for misspelt ones
TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")  # only the first two are accepted
OTHER_FORMATS = (".yaml", ".yml", ".json", ".jsonl", ".py")
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SCENARIOS = RECIPES.with_name("scenarios")
STAGES = "stage"  # a recipe's array of stages
PREFIX = "stage:"
"""`stage:NAME` in place of a model or file stands for the output of that stage."""
INPUT_PATHS: tuple[KeyPath, ...] = (
    ("task", "path"),
    ("task", "held_out_path"),
    ("task", "sources", "path"),
    ("data", "path"),
    ("data", "held_out_path"),
    ("data", "sources", "path"),
    ("eval", "sets", "path"),
    ("pool", "path"),
    ("simulation", "model"),
    ("simulation", "catalog"),
    ("simulation", "lengths_from"),
)
ARRAYS_OF_TABLES: tuple[KeyPath, ...] = (
    ("scoring", "rewards"),
    ("task", "sources"),
    ("data", "sources"),
    ("eval", "sets"),
    ("eval", "rewards"),
    ("algorithm", "loss_terms"),
)
MODEL_SOURCES: tuple[KeyPath, ...] = (("model", "source"), ("critic", "source"), ("scoring", "rewards", "model"))
"""Keys that take the name of a model, or a path that starts with ./, ../ or ~."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One source of settings: a recipe, a stage of it, or the command line."""

    name: str
    tree: Tree
    text: str = ""  # of the recipe file, for line numbers
    at: Location = ()  # location of `tree` in the text
    stage: str = ""  # name of the stage that the settings belong to

    def locate(self, location: Location) -> str:
        """`recipe.toml:3`, `command line`, `recipe.toml:7, stage sft`; empty if this layer does not set the key."""
        if value_at(self.tree, location, ABSENT) is ABSENT:
            return ""
        line = line_of(self.text, (*self.at, *location)) if self.text else None
        place = f"{self.name}:{line}" if line else self.name
        return f"{place}, stage {self.stage}" if self.stage else place


@dataclass(slots=True)
class Arguments:
    """The parts of a command line."""

    recipes: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)

    @property
    def items(self) -> list[str]:
        """Recipes and assignments as arguments."""
        options = [f"--{'.'.join(path)}" + ("" if text is None else f"={text}") for path, text in self.assignments]
        return [f"@{recipe}" for recipe in self.recipes] + options


def split_arguments(args: Sequence[str]) -> Arguments:
    """Parse `@file`, `--key value`, `--key=value` and `--flag`. A value may be a negative number."""
    found, remaining = Arguments(), list(args)
    while remaining:
        item = remaining.pop(0)
        if item.startswith("@"):
            found.recipes.append(item[1:])
        elif not item.startswith("--"):
            found.rest.append(item)
        else:
            name, sign, text = item[2:].partition("=")
            path = tuple(name.split("."))
            value = text if sign else None
            if not sign and remaining and _is_value(remaining[0], _key(path)):
                value = remaining.pop(0)
            found.assignments.append((path, value))
    return found


def _is_value(item: str, key: Key | None) -> bool:
    """Whether the argument after an option is its value."""
    if key is not None and key.is_flag:
        return item.lower() in TRUTH_VALUES or f'"{item}"' in key.accepts
    return not item.startswith("--") and item != "=" and (key is not None or not item.startswith("@"))


def _key(path: Sequence[str]) -> Key | None:
    """The key that an option sets, of the run or, as `stage.NAME.key`, of one stage."""
    return find(path[2:] if path[0] == STAGES else path)


def _is_section(path: KeyPath) -> bool:
    own = path[2:] if path[0] == STAGES else path
    return not own or is_table(own)


def command_line(assignments: Sequence[Assignment]) -> Layer:
    """The overrides as one layer, whatever their order. Relative paths start at the working directory.

    Options without a value are skipped; `missing_values` reports them.
    """
    tree: Tree = {}
    for path, text in assignments:
        key = _key(path)
        if text is not None:
            _put(tree, path, parse_value(text, key))
        elif key is not None and key.is_flag:
            _put(tree, path, True)
    return Layer(name=COMMAND_LINE, tree=with_absolute_paths(tree, Path.cwd()))


def _put(tree: Tree, path: KeyPath, value: Any) -> None:
    """Set a key. Tables merge; a plain value in place of a section is kept, so that validation reports it."""
    node = tree
    for depth, part in enumerate(path[:-1], start=1):
        if part in node and not isinstance(node[part], dict) and _is_section(path[:depth]):
            return
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    if isinstance(value, Mapping) and _is_section(path):
        for name, below in value.items():
            _put(tree, (*path, *str(name).split(".")), below)
    elif isinstance(value, Mapping):  # a free-form table, whose names may have dots
        below = node.get(path[-1])
        node[path[-1]] = {**(below if isinstance(below, dict) else {}), **value}
    else:
        node[path[-1]] = value


def parse_value(text: str, key: Key | None) -> Any:
    """A command-line value: TOML if it parses, else text. Text, paths and choices need no quotes; `none` unsets."""
    if key and key.optional and text == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if key and key.is_number:  # TOML does not accept `.5` and `007`
            for kind in (int, float):
                with suppress(ValueError):
                    return kind(text)
        return text
    value = parsed["value"] if list(parsed) == ["value"] else text
    return text if key and key.accepts_text and not isinstance(value, str) else value


def missing_values(assignments: Sequence[Assignment]) -> list[ConfigIssue]:
    """The issues of options without a value that are not flags."""
    issues = []
    for path, text in assignments:
        option, key = f"--{'.'.join(path)}", _key(path)
        if text is not None or (key is not None and key.is_flag):
            continue
        if key is not None:
            what, hint = "needs a value", f"write {option} VALUE ({key.accepts})"
        else:
            flags = difflib.get_close_matches(path[0], COMMAND_FLAGS, 1, 0.7) if len(path) == 1 else []
            closest = flags[0] if flags else suggest(path)
            plain = f"did you mean --{closest}?" if flags else key_hint(closest, prefix="--")
            what, hint = "unknown option", foreign_hint(path, closest) or plain
        issues.append(ConfigIssue(key=option, what=what, hint=hint))
    return issues


def recipe_layer(name: str) -> Layer:
    """A recipe file as a layer. Relative paths in it start at its folder.

    Raises:
        ConfigError: the file is missing, unreadable or not TOML.
    """
    path = recipe_path(name)
    if not name:
        what, hint = "names no recipe", "write @recipe.toml, without a space"
    elif path.suffix in OTHER_FORMATS and path.is_file():
        what, hint = "recipes are TOML files", "write it as TOML; `tidemill recipe show jsonl` shows one"
    elif path.is_dir() and (path / "config.toml").is_file():
        what = "is the directory of a run, not a recipe"
        hint = f"write --run.dir {name} to resume it, or @{path / 'config.toml'} to take its configuration"
    else:
        try:
            text = path.read_bytes().decode("utf-8-sig")  # some editors of Windows begin a file with a byte order mark
            return Layer(name=name, tree=with_absolute_paths(parse_toml(text, source=name), path.parent), text=text)
        except (FileNotFoundError, NotADirectoryError):
            what, hint = "no such file", nearby_recipes(path)
        except UnicodeDecodeError:
            what, hint = "not UTF-8 text", "save the recipe as UTF-8"
        except OSError as error:
            what, hint = f"cannot be read: {(error.strerror or str(error)).lower()}", "name a readable TOML file"
    raise ConfigError([ConfigIssue(key=f"@{name}", what=what, hint=hint)])


def built_in_recipes() -> dict[str, Path]:
    """The recipes that are installed with Tidemill, by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.toml"))}


def recipe_path(name: str) -> Path:
    """The file of a recipe: a path, or the name of a built-in recipe or scenario if there is no such file."""
    path, scenario = Path(name).expanduser(), SCENARIOS / f"{name}.toml"
    if path.is_file():
        return path
    return built_in_recipes().get(name, scenario if scenario.is_file() else path)


def nearby_recipes(missing: Path) -> str:
    """A hint with the recipes whose names are closest: built-in ones, in the missing file's folder and here."""
    folders = dict.fromkeys([missing.parent, Path()])
    recipes: dict[str, Path] = {
        each.stem: each for folder in reversed(folders) if folder.is_dir() for each in sorted(folder.glob("*.toml"))
    }
    recipes |= {name: Path(name) for name in built_in_recipes()}
    close = difflib.get_close_matches(missing.stem, recipes, 3, 0.5)
    if close:
        return f"did you mean {' or '.join(f'@{recipes[stem]}' for stem in close)}?"
    if recipes:
        return f"available recipes: {', '.join(f'@{each}' for each in list(recipes.values())[:6])}"
    return "name an existing TOML file"


def with_absolute_paths(tree: Tree, folder: Path) -> Tree:
    """Make relative input paths absolute, from `folder`, in stages too. run.dir is an output and stays relative to the
    working directory."""
    return {name: _with_absolute_paths((name,), value, folder) for name, value in tree.items()}


def _with_absolute_paths(path: KeyPath, value: Any, folder: Path) -> Any:
    of_stages = path == (STAGES,)
    if isinstance(value, dict):  # the command line's stages are tables by name
        below = {name: () if of_stages else (*path, name) for name in value}
        return {name: _with_absolute_paths(below[name], each, folder) for name, each in value.items()}
    if isinstance(value, list) and (of_stages or path in ARRAYS_OF_TABLES or path in FUNCTION_KEYS):
        return [_with_absolute_paths(() if of_stages else path, each, folder) for each in value]
    if not isinstance(value, str) or value.startswith((PREFIX, HUB)):
        return value
    if path in INPUT_PATHS or (path in MODEL_SOURCES and value.startswith(("./", "../", "~"))):
        return _absolute(value, folder)
    if path == ("run", "dir") and value.startswith("~"):
        return str(Path(value).expanduser())
    file, colon, function = value.rpartition(":")
    is_function = path in FUNCTION_KEYS and colon and file.endswith(".py")
    return f"{_absolute(file, folder)}:{function}" if is_function else value


def _absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / Path(path).expanduser())  # noqa: PTH100 (does not resolve symbolic links)


def merge(base: Tree, over: Tree, at: KeyPath = ()) -> Tree:
    """`over` on top of `base`: tables merge key by key, other values are replaced. Neither argument is changed.

    A section whose `kind` changes loses the old kind's keys.
    """
    has_kinds = len(at) == 1 and at[0] in variants()
    if has_kinds and "kind" in over and over["kind"] != base.get("kind", default_kind(at[0])):
        base = {}
    merged = dict(base)
    for name, value in over.items():
        below = base.get(name)
        both_tables = isinstance(value, dict) and isinstance(below, dict)
        merged[name] = merge(below, value, (*at, name)) if both_tables else value  # type: ignore[arg-type]
    return merged


ComposedT = TypeVar("ComposedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The layers of a command line, and the issues found while reading them."""

    layers: Sequence[Layer]  # the recipes, then the command line
    issues: Sequence[ConfigIssue]
    complete: bool  # every recipe could be read

    def composed(self, compose: Callable[[Sequence[Layer]], ComposedT]) -> ComposedT:
        """The result of `compose` for the layers.

        Raises:
            ConfigError: every issue of reading, then of composing. Without one of its recipes, composing would report
                consequential errors and is skipped.
        """
        if not self.issues:
            return compose(self.layers)
        more: Sequence[ConfigIssue] = ()
        if self.complete:
            try:
                compose(self.layers)
            except ConfigError as error:
                more = error.issues
        raise ConfigError([*self.issues, *more])


def load_spec(args: Sequence[str], *, purpose: Purpose = "train") -> RunSpec:
    """Load the run that `args` describe.

    Recipes apply from left to right, then overrides, wherever they stand on the command line. Tables merge, arrays and
    values are replaced, and a changed `task.kind` drops the old kind's keys. Relative input paths (task files, a
    reward's file, a model folder written ./folder) start at the recipe's folder, or at the working directory when given
    on the command line. run.dir is an output and always starts at the working directory.

    Args:
        args: `@file.toml`, `--section.key value`, `--section.key=value`, and `--section.flag` for true.
        purpose: training refuses sampling settings that its loss cannot account for.

    Raises:
        ConfigError: every issue found.
    """
    sources = read_sources(args)
    if has_stages(sources.layers):
        source = next((place for layer in sources.layers if (place := layer.locate((STAGES, 0)))), "")
        hint = "name a recipe without stages, or the run directory of a stage (--checkpoint runs/NAME/stages/STAGE-...)"
        what = "the recipe has stages, and this command needs a single run"
        raise ConfigError([ConfigIssue(key=STAGES, what=what, source=source, hint=hint)])
    return sources.composed(lambda layers: compose(layers, purpose=purpose))


def read_sources(args: Sequence[str]) -> Sources:
    """Read the recipes that `args` name, and their overrides.

    Raises:
        ConfigError: an argument is neither a recipe nor an override.
    """
    given = split_arguments(args)
    if "=" in given.rest:
        raise ConfigError([ConfigIssue(key="=", what="stands alone", hint="write --section.key=value, without spaces")])
    if given.rest:
        options = [item for item in given.rest if item.startswith("-")]  # what follows them is their value
        raise ConfigError([_unexpected(item) for item in options or given.rest])
    layers, issues = [], list[ConfigIssue]()
    for recipe in given.recipes:
        try:
            layers.append(recipe_layer(recipe))
        except ConfigError as error:
            issues += error.issues
    layers.append(command_line(given.assignments))
    complete = len(layers) == len(given.recipes) + 1
    return Sources(layers=layers, issues=issues + missing_values(given.assignments), complete=complete)


def _unexpected(item: str) -> ConfigIssue:
    what, hint = "unexpected argument", "write @recipe.toml or --section.key value"
    name, sign, value = item.lstrip("+-").partition("=")
    if item.endswith(".toml") or Path(item).is_file() or item in built_in_recipes():
        what, hint = "a recipe needs a leading @", f"write @{item}"
    elif _key(tuple(name.split("."))):
        what, hint = "an override needs two leading dashes", f"write --{name}{sign}{value}"
    elif sign and (foreign := foreign_hint((name,), "")):
        what, hint = "an override needs two leading dashes and a key of Tidemill", foreign
    elif item.startswith("-"):
        what, hint = "unknown option", "options begin with two dashes; `tidemill train --help` lists them"
    elif address := address_hint(item):
        hint = f"{address}, as the value of --model.source or --task.path (of --task.kind=file)"
    elif item in BUILT_IN_MODELS:
        what = "is a model, not an argument"
        hint = f"write --model.source {item}, or --checkpoint {item} where that is an option"
    elif Path(item).is_dir():
        hint = f"write --checkpoint {item} to use the model in it; train resumes a run with --run.dir {item}"
    return ConfigIssue(key=item, what=what, hint=hint)


def has_stages(layers: Sequence[Layer]) -> bool:
    return any(STAGES in layer.tree for layer in layers)


def override_layers(recipe: str | Path | None, overrides: Mapping[str, Any]) -> list[Layer]:
    """The layers of a recipe and of overrides given as Python values, by dotted key or as tables."""
    layer = Layer(name="overrides", tree=override_tree(overrides))
    return [layer] if recipe is None else [recipe_layer(str(recipe)), layer]


def override_tree(overrides: Mapping[str, Any]) -> Tree:
    """Overrides as nested tables: `{"a.b": 1}` and `{"a": {"b": 1}}` are the same. Relative paths become absolute."""
    tree: Tree = {}
    for name, value in overrides.items():
        _put(tree, tuple(str(name).split(".")), value)
    return with_absolute_paths(tree, Path.cwd())


def from_toml(text: str, *, source: str = "config.toml", folder: Path | None = None) -> RunSpec:
    """The run in a TOML document, for example one written by `to_toml`. Relative input paths start at `folder`."""
    tree = parse_toml(text, source=source)
    if folder is not None:
        tree = with_absolute_paths(tree, folder)
    return compose([Layer(name=source, tree=tree, text=text)], purpose="read")


def compose(layers: Sequence[Layer], *, purpose: Purpose) -> RunSpec:
    """Merge the layers, later over earlier, and validate the result.

    Raises:
        ConfigError: every issue found.
    """
    tree: Tree = {}
    misplaced: list[ConfigIssue] = []
    for layer in layers:
        tree = merge(tree, _valid_tables(layer, layer.tree, misplaced))
    for section in variants():
        if isinstance(tree.get(section), dict):
            tree[section].setdefault("kind", default_kind(section))

    def locate(location: Location) -> str:
        # A missing or derived key is reported where its section was given.
        for size in range(len(location), 0, -1):
            for layer in reversed(layers):
                if found := layer.locate(location[:size]):
                    return found
        return ""

    inconsistent: list[str] = []
    try:
        # Validated as JSON, because strict mode accepts an array for a tuple and text for a path only there.
        document = json.dumps(tree, default=str)
        spec = RunSpec.model_validate_json(document, strict=True, context={"issues": inconsistent})
    except ValidationError as error:
        raise ConfigError([*misplaced, *issues_from(error, tree, locate)]) from None
    if misplaced:
        raise ConfigError(misplaced)
    if issues := [*map(split_hint, inconsistent), *purpose_issues(spec, purpose)]:
        raise ConfigError(issues)
    return spec


def _valid_tables(layer: Layer, tree: Tree, misplaced: list[ConfigIssue], at: KeyPath = ()) -> Tree:
    """`tree` without plain values in place of sections, which go to `misplaced`: merging would hide them."""
    kept: Tree = {}
    for name, value in tree.items():
        path = (*at, name)
        if not is_table(path):
            kept[name] = value
        elif isinstance(value, dict):
            kept[name] = _valid_tables(layer, value, misplaced, path)
        else:
            misplaced.append(value_for_section(path, value, layer.locate(path)))
    return kept


def differences(old: RunSpec, new: RunSpec) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) where two runs differ; None for a key that only the other one has."""
    before, after = flattened(old.model_dump(mode="json")), flattened(new.model_dump(mode="json"))
    names = dict.fromkeys([*before, *after])
    return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
