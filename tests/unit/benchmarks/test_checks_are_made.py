"""No benchmark has lost the call of a check."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
FILES = sorted(BENCHMARKS.rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def calls_in(file: Path) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)}


def defined(file: Path) -> list[str]:
    return re.findall(r"^def (check_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("check", [name for file in FILES for name in defined(file)])
def test_every_check_is_called(check: str) -> None:
    assert any(check in calls_in(file) for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(BENCHMARKS)))
def test_every_imported_check_is_called(file: Path) -> None:
    imported = [
        name.name for node in ast.walk(tree_of(file)) if isinstance(node, ast.ImportFrom) for name in node.names
    ]
    assert {name for name in imported if name.startswith("check_")} <= calls_in(file)
