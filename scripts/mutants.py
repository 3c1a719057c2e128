"""Change one operator or number of the source at a time, and print which changes no test notices.

    python scripts/mutants.py [--count 100] [--seed 0] [--hours 2]

A seed draws the same mutants of the same source. Each is tested by the file that mirrors its module, and, if that finds
nothing, by all unit tests and properties of its package. The source itself is not touched: mutants are made in a copy.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "tidemill"
PACKAGES = ("algos", "trainer", "config")
LIMIT_S, PROCESSES = 900.0, 2  # a mutant may loop for ever
OPERATORS: list[tuple[Any, Any]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
]
OTHER: dict[Any, Any] = {one: other for pair in OPERATORS for one, other in (pair, pair[::-1])}


@dataclass(frozen=True, slots=True)
class Mutant:
    module: Path  # below src/tidemill
    line: int
    start: int  # bytes of the source that are replaced
    end: int
    before: str
    after: str


def changed(node: ast.AST) -> Any:
    """A copy of the node with one change; None if none is known."""
    made: Any = copy.deepcopy(node)
    match made:
        case ast.Compare(ops=[operator]) if type(operator) in OTHER:
            made.ops = [OTHER[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OTHER:
            made.op = OTHER[type(operator)]()
        case ast.UnaryOp(op=ast.Not()):
            made = made.operand
        case ast.Constant(value=bool() as value):
            made.value = not value
        case ast.Constant(value=int() | float() as value):
            made.value = value + 1
        case _:
            made = None
    return made


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a syntax tree without annotations, and without f-strings, in which Python 3.11 knows no places."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from executed(child)


def mutants_of(path: Path) -> Iterator[Mutant]:
    text = path.read_bytes()
    lines = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    for node in executed(ast.parse(text)):
        if isinstance(node, ast.expr) and (made := changed(node)) is not None:
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            yield Mutant(path.relative_to(SOURCE), node.lineno, start, end, ast.unparse(node), f"({ast.unparse(made)})")


def passes(source: Path, tests: list[Path]) -> bool:
    """Whether the tests pass with the source in a folder; not if they take too long."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    process = subprocess.Popen(
        [*command, *map(str, tests)], cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(LIMIT_S) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def mirrors(module: Path) -> list[list[Path]]:
    """Tests of a module: the file that bears its name, then those of its package."""
    rooms = [REPOSITORY / "tests" / kind / module.parent for kind in ("unit", "property")]
    stages = [rooms[0] / f"test_{module.stem}.py"], rooms
    return [tests for stage in stages if (tests := [path for path in stage if path.exists()])]


def survives(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "tidemill"
        shutil.copytree(SOURCE, source)
        path = source / mutant.module
        text = path.read_bytes()
        path.write_bytes(text[: mutant.start] + mutant.after.encode() + text[mutant.end :])
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):  # it may have the same second and size
            compiled.unlink()
        return all(passes(Path(folder), tests) for tests in mirrors(mutant.module))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("count", 100), ("seed", 0), ("hours", 2.0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    arguments = parser.parse_args()
    until = time.monotonic() + 3600 * arguments.hours
    paths = sorted(path for name in PACKAGES for path in (SOURCE / name).rglob("*.py"))
    everything = [mutant for path in paths for mutant in mutants_of(path)]
    drawn = random.Random(arguments.seed).sample(everything, arguments.count)
    if not passes(SOURCE.parent, [room for name in PACKAGES for room in mirrors(Path(name) / "all")[0]]):
        print("the tests fail without a mutant", file=sys.stderr)
        return 1

    def tested(mutant: Mutant) -> str:
        if time.monotonic() > until:
            return "not tested"
        result = "survived" if survives(mutant) else "killed"
        print(f"{result:10} {f'{mutant.module}:{mutant.line}':34} {mutant.before}  →  {mutant.after}", flush=True)
        return result

    with ThreadPoolExecutor(PROCESSES) as threads:
        results = list(threads.map(tested, drawn))
    print(f"of {len(everything)} mutants:", ", ".join(f"{results.count(name)} {name}" for name in sorted(set(results))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
