"""docs/reference/commands.md lists every command and recipe, and options that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.commands import run_here
from tidemill.cli.app import VERBS
from tidemill.config.load import RECIPES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`\n]+)`")
OPTION = re.compile(r"--[a-z][a-z-]+(?![a-z.-])")


def rows() -> Iterator[tuple[str, list[str], str]]:
    """Of the tables of commands: verb, the commands below it, the options in the last column."""
    for line in PAGE.splitlines():
        if line.startswith("| `tidemill "):
            command, _, *options = (cell.strip() for cell in line.strip("|").split(" | "))
            first, *others = CODE.findall(command)
            words = first.split()[1:]
            below = [*words[1:2], *others] if words[0] in APPS else []
            yield words[0], below, options[0] if options else ""


def commands_below(verb: str) -> set[str]:
    module, _, attribute = VERBS[verb][0].partition(":")
    app = getattr(import_module(module), attribute)
    return {name for name in app if not name.startswith("-")}


APPS = [verb for verb, (target, _) in VERBS.items() if target.endswith(":app")]


@cache
def help_of(*words: str) -> str:
    return run_here(*words, "--help").out


def test_every_command_is_on_the_page() -> None:
    assert {verb for verb, _, _ in rows()} == set(VERBS)
    for verb in APPS:
        assert {name for each, below, _ in rows() for name in below if each == verb} == commands_below(verb), verb


@pytest.mark.parametrize(("verb", "below", "options"), [row for row in rows() if OPTION.search(row[2])])
def test_the_options_exist(verb: str, below: list[str], options: str) -> None:
    listed = "\n".join(help_of(verb, *([name] if name else [])) for name in below or [""])
    assert [option for option in OPTION.findall(options) if option not in listed] == []


def test_every_recipe_is_on_the_page() -> None:
    assert {path.stem for path in RECIPES.glob("*.toml")} <= set(CODE.findall(PAGE))
