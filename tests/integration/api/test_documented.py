"""The Python examples of README.md and docs/extending.md run as printed, and pass `mypy --strict`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(block, id=f"{path.stem}-{number}")
    for path in (REPOSITORY / "README.md", REPOSITORY / "docs" / "extending.md")
    for number, block in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("source", EXAMPLES)
@pytest.mark.timeout(300)
def test_the_example_runs(source: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(source.replace('"trainer.steps": 10', '"trainer.steps": 1'))
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_examples_are_typed(tmp_path: Path) -> None:
    files = []
    for number, example in enumerate(EXAMPLES):
        file = tmp_path / f"example_{number}.py"
        file.write_text(str(example.values[0]))
        files.append(str(file))
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout


def test_the_first_example_is_short() -> None:
    (source,) = (str(each.values[0]) for each in EXAMPLES if each.id == "README-0")
    assert len(source.splitlines()) <= 40
