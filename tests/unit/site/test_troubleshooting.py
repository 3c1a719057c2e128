"""The messages of docs/troubleshooting.md are those of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^### (?:[^`\n]*: )?`(?P<message>.+)`$", re.MULTILINE)
MESSAGES = HEADING.findall(PAGE)
SHORTEST = 5
"""Characters of a part of a message; shorter ones are in any message."""
LONG = 10
COVERED, COVERED_BY_SHORT = 0.4, 0.6
"""Shares of a message that the texts of one source file must contain, with and without a long one among them; the rest
are values."""


@cache
def texts() -> dict[Path, frozenset[str]]:
    """What the messages of each source file are made of: its texts, without values and hints on a further line."""
    found = dict[Path, frozenset[str]]()
    for path in sorted((ROOT / "src").rglob("*.py")):
        constants = constants_of(ast.parse(path.read_text(encoding="utf-8")))
        lines = (line for text in constants for line in text.splitlines())
        found[path] = frozenset(line for line in lines if len(line.strip()) >= SHORTEST)
    return found


def constants_of(tree: ast.AST) -> Iterator[str]:
    """Texts, and the parts of f-strings between their values."""
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_made_of(message: str, parts: frozenset[str]) -> bool:
    is_covered = [False] * len(message)
    present = [part for part in parts if part in message]
    for part in present:
        for found in re.finditer(re.escape(part), message):
            is_covered[found.start() : found.end()] = [True] * len(part)
    needed = COVERED if any(len(part) >= LONG for part in present) else COVERED_BY_SHORT
    return sum(is_covered) >= needed * len(message)


def is_in_the_source(message: str) -> bool:
    return any(is_made_of(message, parts) for parts in texts().values())


def test_there_are_messages() -> None:
    assert len(MESSAGES) >= 30


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_source(message: str) -> None:
    assert is_in_the_source(message)


@pytest.mark.parametrize(
    "message",
    [
        "Ray is not present",
        "no sample of the last 3 steps got a valid price, so nothing was learned",
        "needs 310 GB of disk, and 19.5 GB are free",
        "torch sees no GPU",
        "this run was begun with other settings: batch.prompts = 3",
    ],
)
def test_a_message_that_the_source_lacks_is_noticed(message: str) -> None:
    assert not is_in_the_source(message)
