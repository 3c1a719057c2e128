"""Where a result comes from: commit, changed files, command, settings and date; and which code it depends on."""

from __future__ import annotations

import argparse
import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"benchmarks": ROOT / "benchmarks", "tests": ROOT / "tests", "tidemill": ROOT / "src" / "tidemill"}
DATA = (".py", ".toml", ".json", ".csv", ".txt")
"""Suffixes of files that a module may name instead of importing them."""
_settings: dict[str, Any] = {}
_code: dict[str, Any] = {}  # when the command started


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line's options, which every result of this process then names, with the code as it is now."""
    options = parser.parse_args()
    _code.update(_current_code())
    _settings.update({name: _plain(value) for name, value in vars(options).items()})
    return options


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def origin() -> dict[str, Any]:
    """Of a result that this process measured."""
    module = _main_module()
    return {
        "module": module,
        "command": " ".join(["python", "-m", module, *sys.argv[1:]]),
        "settings": dict(_settings),
        **(_code or _current_code()),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _current_code() -> dict[str, Any]:
    """Commit and changed files; of a copy without a repository, the digest of its code instead."""
    files = code_of(_main_module())
    if not (ROOT / ".git").exists():
        return {"commit": "", "changed": [], "source": source_digest()}
    return {
        "commit": _git("rev-parse", "HEAD").strip(),
        "changed": [line[3:] for line in _git("status", "--porcelain", *files).splitlines()],
    }


def source_digest() -> str:
    """32 hex digits (SHA-256) over names and contents of all code of Tidemill and the benchmarks, without results."""
    folders = (PACKAGES["tidemill"], PACKAGES["benchmarks"])
    files = (
        file for folder in folders for file in folder.rglob("*") if file.suffix in DATA and "results" not in file.parts
    )
    digest = hashlib.sha256()
    for name, file in sorted((file.relative_to(ROOT).as_posix(), file) for file in files):
        digest.update(f"{name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def origin_of(file: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Of a result file or a part of it; for those that name none, the commit that wrote the file stands for it."""
    if "origin" in result:
        return dict(result["origin"])
    (commit, date), module = committed(file), writer_of(file.stem)
    command = f"python -m {module}" if module else ""
    return {"commit": commit, "date": date, "module": module, "command": command, "changed": []}


def with_origin(part: Mapping[str, Any], file: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a result that later commands keep, with its origin: its own, or else that of the result."""
    return dict(part) if "origin" in part else {**part, "origin": origin_of(file, result)}


def origins_in(content: Any) -> list[dict[str, Any]]:
    """All different origins in a result: that of the last command, and those of its parts."""
    found, due = list[dict[str, Any]](), [content]
    while due:
        each = due.pop()
        if isinstance(each, dict) and {"module", "command", "commit"} <= each.keys():
            found += [] if each in found else [each]
        elif isinstance(each, dict | list):
            due += each.values() if isinstance(each, dict) else each
    return found


def _main_module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return "" if spec is None else str(spec.name).removesuffix(".__main__")


def writer_of(name: str) -> str:
    """The benchmark of a result: the module of its name, or the one that calls `write_result` with it; "" if none."""
    folder = PACKAGES["benchmarks"]
    named = folder / f"{name}.py"
    files = [named] if named.is_file() else [file for file in sorted(folder.rglob("*.py")) if name in _written(file)]
    return ".".join(["benchmarks", *files[0].relative_to(folder).with_suffix("").parts]) if files else ""


@cache
def _written(file: Path) -> frozenset[str]:
    """Names that stand in the first argument of calls of `write_result`."""
    calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    names = (call.args[0] for call in calls if ast.unparse(call.func) == "write_result")
    return frozenset(
        part.value
        for name in names
        for part in ast.walk(name)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def committed(file: Path) -> tuple[str, str]:
    """(commit, date) of the last change of a file."""
    commit, _, date = _git("log", "-1", "--format=%H %cs", "--", str(file.relative_to(ROOT))).strip().partition(" ")
    return commit, date


def changed_since(commit: str, module: str) -> list[str]:
    """Files that a benchmark imports and that a commit has otherwise.

    Raises:
        ValueError: the commit or the benchmark is not known.
    """
    if not commit:
        raise ValueError("measured in a copy without a repository")
    if not (files := code_of(module)):
        raise ValueError(f"there is no {module or 'benchmark of it'}")
    try:
        return _git("diff", "--name-only", commit, "--", *files).splitlines()
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{commit[:9]} is no commit of this repository") from error


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def code_of(module: str) -> list[str]:
    """The files of this repository that a module imports, wherever the import stands, or names as a program; the files
    of their folders that these name, and the recipes that the benchmarks among them name; relative paths, sorted."""
    found, due = set[Path](), list(_files(module))
    while due:
        file = due.pop()
        if file not in found:
            found.add(file)
            for name in _imports(file):
                due += _files(name)
    for file in list(found):
        found.update(_named(file))
    return sorted(str(file.relative_to(ROOT)) for file in found)


def _files(module: str) -> Iterator[Path]:
    """The file of a module, its packages', and of a package run as a program."""
    first, *rest = module.split(".")
    if first not in PACKAGES:
        return
    place = PACKAGES[first]
    for part in [None, *rest]:
        place = place if part is None else place / part
        yield from (file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file())
    if (place / "__main__.py").is_file():
        yield place / "__main__.py"


@cache
def _named(file: Path) -> tuple[Path, ...]:
    """Files of the same folder whose name is a string of the file; of a benchmark, also recipes."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
    found = [each for each in file.parent.iterdir() if each.suffix in DATA and each.name in strings]
    if PACKAGES["benchmarks"] in file.parents:
        recipes = (PACKAGES["tidemill"] / "recipes").glob("*.toml")
        found += [recipe for recipe in recipes if {recipe.name, recipe.stem} & strings]
    return tuple(found)


@cache
def _imports(file: Path) -> tuple[str, ...]:
    names = list[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("benchmarks."):
            names.append(node.value.partition(":")[0])  # run in a process of its own
    return tuple(names)
