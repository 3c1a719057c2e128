"""The Python examples and the commands of the docs work as printed, with Tidemill from a wheel."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import tidemill

REPOSITORY = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(block, id=f"{path.stem}-{number}")
    for path in (REPOSITORY / name for name in ("README.md", "docs/extending.md", "docs/agents.md"))
    for number, block in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
]


Run = Callable[[list[str], Path], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python in a folder with the contents of a wheel of this checkout, and with the installed dependencies."""
    built, unpacked = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), str(REPOSITORY)]
    subprocess.run(pip, check=True, timeout=200)
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(unpacked)

    def python(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        command, environment = [sys.executable, *words], {**os.environ, "PYTHONPATH": str(unpacked)}
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
        )

    where = python(["-c", "import tidemill; print(tidemill.__file__)"], unpacked.parent)
    assert where.stdout.startswith(str(unpacked))
    return python


@pytest.mark.parametrize("source", EXAMPLES)
@pytest.mark.usefixtures("shared_cache")
@pytest.mark.timeout(300)
def test_the_example_runs(source: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(source.replace('"trainer.steps": 10', '"trainer.steps": 1'))
    done = run(["example.py"], tmp_path)
    assert done.returncode == 0, done.stderr


COMMAND = re.compile(r"(?:^|`)(tidemill [^`#\n|]+)", re.MULTILINE)
NOT_RUN = {
    "tidemill doctor": "slow; tests/unit/cli/test_doctor.py runs it",
    "tidemill calibrate": "needs a longer run; tests/integration/test_calibrate.py runs it",
    "tidemill plan run": "needs a profile; tests/integration/test_calibrate.py runs it",
    "tidemill plan staleness --table lags.csv": "needs a table of the user; tests/unit/cli/test_plan.py runs it",
    "tidemill model merge RUN FOLDER": "needs an adapter; tests/integration/test_lora.py runs it",
    "tidemill eval --checkpoint runs/mine --compare runs/other": "as the other tidemill eval",
}
"""Commands in the docs that this test does not run, and why."""
DRY = ("train", "eval", "generate", "simulate")


def documented_commands() -> list[str]:
    text = "\n".join(
        (REPOSITORY / name).read_text(encoding="utf-8").replace("\\\n", " ")
        for name in ("README.md", "docs/guide.md", "docs/planner.md")
    )
    commands = dict.fromkeys(" ".join(found.split()) for found in COMMAND.findall(text))
    return [each for each in commands if len(each.split()) > 2 or each.split()[1] in ("algorithms", "doctor")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a data file and the runs that the docs name."""
    path = tmp_path_factory.mktemp("user")
    (path / "my.jsonl").write_text("\n".join(f'{{"prompt": "{a}+1=", "answer": "{a + 1}"}}' for a in range(9)))
    small = {"trainer.steps": 1, "trainer.threads": 1, "model.char.layers": 1, "batch.prompts": 2, "eval.prompts": 4}
    tidemill.train("char-addition", overrides=small, run_dir=path / "runs" / "mine")
    for name in ("addition", "demo"):
        shutil.copytree(path / "runs" / "mine", path / "runs" / name)
    return path


@pytest.mark.parametrize("command", documented_commands())
def test_the_command_works_as_printed(command: str, folder: Path, run: Run) -> None:
    if any(command == each or command.startswith(f"{each} ") for each in NOT_RUN):
        pytest.skip(next(why for each, why in NOT_RUN.items() if command.startswith(each)))
    words = shlex.split(command.replace("WORD", "kl_beta"))
    assert words[0] == "tidemill"
    if words[1] in DRY and "--help" not in words:
        words.append("--dry-run")  # what a training or a simulation computes is tested elsewhere
    done = run(["-m", *words], folder)
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
