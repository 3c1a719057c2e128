"""No benchmark has lost the call of a check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
FILES = sorted(BENCHMARKS.rglob("*.py"))
CALLS = {
    file: {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    }
    for file in FILES
}


def defined(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("check_")]


@pytest.mark.parametrize("check", [name for file in FILES for name in defined(file)])
def test_every_check_is_called(check: str) -> None:
    assert any(check in calls for calls in CALLS.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(BENCHMARKS)))
def test_every_imported_check_is_called(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = [name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names]
    assert {name for name in imported if name.startswith("check_")} <= CALLS[file]
