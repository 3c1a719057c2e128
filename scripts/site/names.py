"""Names that pages use and that a later version may lose: verbs, recipes, targets of make, configuration keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import tidemill
from tidemill.api.run import Run
from tidemill.cli.app import OTHER_WORDS, VERBS
from tidemill.config.foreign_names import ours_of
from tidemill.config.issues import ConfigError
from tidemill.config.keys import all_keys, did_you_mean, find, sections, suggest
from tidemill.config.load import built_in_recipes
from tidemill.config.toml import line_of, parse_toml

COMMAND = re.compile(r"^(?:\S*/)?tidemill +(?P<verb>[a-z][a-z-]*)(?: +(?P<second>[a-z][a-z-]*)(?=\s|$))?")
RECIPE = re.compile(r"(?:^|\s)@(?P<name>[a-z0-9][a-z0-9_-]*)(?=\s|$)")
MAKE = re.compile(r"^make\s+(?P<words>.+)")
TARGET = re.compile(r"^([a-z][a-z-]*)(?=[a-z -]*:(?!=))", re.MULTILINE)
OPTION = re.compile(r"(?:^|\s)--(?P<key>[a-z_]+(?:(?:\.|\[\]\.)[A-Za-z0-9_-]+)+)")
KEY = re.compile(
    r"^(?:\[(?P<table>[a-z_]+(?:\.[a-z_]+)+)\]|(?P<key>[a-z_]+(?:(?:\[\])?\.[a-z_]+)+))(?:\s*=\s*[^=].*)?$"
)
FILES = re.compile(
    r"\.(?:toml|jsonl?|md|py|csv|html|svg|js|css|ya?ml|txt|sh|safetensors|log|parquet|onnx|xml|png|ipynb|gguf|so|lock|sock|"
    r"whl|gz|zip|db)$"
)
"""Ends of file names: config.toml is no key."""
PLACEHOLDERS = frozenset(("recipe", "name", "more", "file"))
"""Words that stand for the name of a recipe."""
SECTIONS = frozenset(section[0] for section in sections())
FREE = re.compile(r"\btable\b")
STAGE_TABLES = ("stage",)
PLACEHOLDER = re.compile(r"[A-Z]{3}|^section\.key$")
STAGE_KEYS = frozenset(("name", "kind", "after", "needs"))
ATTRIBUTES: Mapping[str, frozenset[str]] = {
    "run": frozenset({*dir(Run), "path", "stages"}),
    "env": frozenset(dir(tidemill.Environment)),
}
"""Names of Python variables that are also sections, with the attributes that pages may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of one version."""

    verbs: Mapping[str, frozenset[str]]
    """By verb, the verbs below it."""
    recipes: frozenset[str]
    targets: frozenset[str]

    @classmethod
    def of_this_version(cls, root: Path) -> Names:
        below = dict[str, frozenset[str]]()
        for verb, (target, _) in VERBS.items():
            module, _, attribute = target.partition(":")
            app = getattr(import_module(module), attribute) if attribute == "app" else ()
            below[verb] = frozenset(name for name in app if not name.startswith("-"))
        scenarios = (path.stem for path in (Path(tidemill.__file__).parent / "scenarios").glob("*.toml"))
        makefile = (root / "Makefile").read_text(encoding="utf-8")
        checks = re.search(r"^CHECKS := (.*)$", makefile, re.MULTILINE)
        targets = {*TARGET.findall(makefile), *(checks[1].split() if checks else ())}
        return cls(verbs=below, recipes=frozenset({*built_in_recipes(), *scenarios}), targets=frozenset(targets))

    def problems(self, code: str) -> Iterator[tuple[str, str]]:
        """What no longer exists of the names in a command or in inline code, each with a hint."""
        if command := COMMAND.match(code):
            yield from self._command(command["verb"], command["second"])
        if COMMAND.match(code) or code.startswith("@"):
            yield from self._recipes(code)
        if make := MAKE.match(code):
            yield from self._targets(make["words"])
        if code.startswith("--") or COMMAND.match(code):
            for option in OPTION.finditer(code):
                if PLACEHOLDER.search(option["key"]):
                    continue
                yield from key_problem(tuple(option["key"].replace("[]", "").split(".")), f"--{option['key']}")
        elif key := KEY.match(code):
            dotted = key["key"] or key["table"]
            path = tuple(dotted.replace("[]", "").split("."))
            is_ours = path[0] in SECTIONS and not FILES.search(dotted) and path[1] not in ATTRIBUTES.get(path[0], ())
            if is_ours and not ours_of(dotted, certain=True):
                yield from key_problem(path, dotted)

    def _command(self, verb: str, second: str | None) -> Iterator[tuple[str, str]]:
        if verb not in self.verbs:
            other = next((hint for words, hint in OTHER_WORDS.items() if verb in words.split()), "")
            hint = did_you_mean(verb, self.verbs) or other or "`tidemill --help` lists the verbs"
            yield f"there is no command `tidemill {verb}`", hint
        elif self.verbs[verb] and second and second not in self.verbs[verb]:
            hint = did_you_mean(second, self.verbs[verb]) or f"there are {', '.join(sorted(self.verbs[verb]))}"
            yield f"there is no command `tidemill {verb} {second}`", hint

    def _recipes(self, code: str) -> Iterator[tuple[str, str]]:
        for found in RECIPE.finditer(code):
            name = found["name"]
            if name in self.recipes or name in PLACEHOLDERS or name in tidemill.__all__:
                continue
            yield f"there is no recipe @{name}", did_you_mean(name, self.recipes) or "`tidemill recipe list` lists them"

    def _targets(self, words: str) -> Iterator[tuple[str, str]]:
        for word in words.split():
            if not re.fullmatch(r"[a-z][a-z-]*", word):
                if word.startswith("-") or "=" in word:
                    continue
                return
            if word not in self.targets:
                yield (
                    f"there is no target `make {word}`",
                    did_you_mean(word, self.targets) or "`make` lists the targets",
                )

    def toml_problems(self, text: str) -> Iterator[tuple[int, str, str]]:
        """Keys of a recipe that the schema does not have, with their lines."""
        try:
            tree = parse_toml(text, source="block")
        except ConfigError as error:
            issue = error.issues[0]
            yield int(issue.key.rpartition(":")[2]), issue.what, issue.hint
            return
        for path in unknown_keys(tree):
            names = tuple(part for part in path if isinstance(part, str))
            what, hint = next(key_problem(without_stage(names), ".".join(names)))
            yield line_of(text, path) or 1, what, hint


def key_problem(path: tuple[str, ...], shown: str) -> Iterator[tuple[str, str]]:
    """Nothing if the schema has a key or section with this path."""
    path = without_stage(path)
    if is_known(path):
        return
    close = suggest(path)
    yield f"there is no key {shown}", f"did you mean {close}?" if close else "`tidemill config search` finds keys"


def without_stage(path: tuple[str, ...]) -> tuple[str, ...]:
    """`("stage", "sft", "trainer", "steps")` as `("trainer", "steps")`; tables of stages have no name in their path."""
    if path[:1] != STAGE_TABLES:
        return path
    return path[1:] if len(path) > 1 and path[1] in SECTIONS else path[2:]


def is_known(path: tuple[str, ...]) -> bool:
    """Whether a path, without the `[]` of array elements, is a key, a section, or an entry of a free-form table."""
    if not path:
        return True
    flat = {tuple(part for part in key.path if part != "[]"): key for key in all_keys()}
    if path in flat or path in {tuple(part for part in section if part != "[]") for section in sections()}:
        return True
    around = (flat.get(path[:depth]) for depth in range(1, len(path)))
    return any(table is not None and FREE.search(table.accepts) for table in around)


def unknown_keys(tree: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of the values of a recipe that no key has."""
    if isinstance(tree, dict):
        names = tuple(part for part in at if isinstance(part, str))
        key = find(without_stage(names)) if names else None
        if key is not None and FREE.match(key.accepts):
            return  # its entries are free
        for name, value in tree.items():
            if names == STAGE_TABLES and name in STAGE_KEYS:
                continue
            yield from unknown_keys(value, (*at, name))
    elif isinstance(tree, list) and tree and all(isinstance(each, dict) for each in tree):
        for number, each in enumerate(tree):
            yield from unknown_keys(each, (*at, number))
    elif not is_known(without_stage(tuple(part for part in at if isinstance(part, str)))):
        yield at
