"""The Python example of the README and the commands of the docs work as printed.

`make test` runs the commands that are fast, in this process. `make test-docs` runs all of them, and the example with
Tidemill from a wheel; `tests/docs/test_code_blocks.py` runs the other code blocks of the docs. `test_distributions.py`
runs the commands in an empty environment.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tidemill
from scripts.site.blocks import code_blocks
from tests.chat_models import CHATML, chat_codec
from tests.commands import run_here
from tests.forked import Forked
from tests.integration.api.conftest import Distributions
from tidemill.config.load import load_spec
from tidemill.data.build_task import build_task

# One process makes the wheel and imports it once.
pytestmark = pytest.mark.xdist_group("documented")
DEADLINE_S = 280.0
REPOSITORY = Path(__file__).resolve().parents[3]
HOW_TO = REPOSITORY / "docs" / "how-to"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(block, id=f"README-{number}")
    for number, block in enumerate(BLOCK.findall((REPOSITORY / "README.md").read_text(encoding="utf-8")))
]
SHORTER = {
    '"trainer.steps": 10,': '"trainer.steps": 1, "batch.prompts": 2, "batch.group_size": 2, "eval.prompts": 2,',
}
"""What makes an example with a pretrained model take long."""


@pytest.fixture(scope="module")
def package(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a wheel of this checkout."""
    unpacked = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(distributions.wheel).extractall(unpacked)
    (unpacked.parent / "where.py").write_text("import tidemill; print(tidemill.__file__)")
    assert ran("where.py", package=unpacked, folder=unpacked.parent).startswith(str(unpacked))
    return unpacked


def ran(script: str, *, package: Path, folder: Path) -> str:
    """What a script prints that runs in a folder, with a package and the installed dependencies."""
    with Forked(script, target="tests.script:main", cwd=folder, package=package) as process:
        out, errors = process.communicate(DEADLINE_S)
    assert process.returncode == 0, errors
    return out


@pytest.mark.slow  # `make test-docs` runs it; test_train.py and test_models.py call what it calls
@pytest.mark.parametrize("source", EXAMPLES)
@pytest.mark.usefixtures("shared_cache")
@pytest.mark.timeout(300)
def test_the_example_runs(source: str, package: Path, tmp_path: Path) -> None:
    for written, shorter in SHORTER.items():
        source = source.replace(written, shorter)
    (tmp_path / "example.py").write_text(source)
    ran("example.py", package=package, folder=tmp_path)


COMMAND = re.compile(r"(?:^|`)(tidemill [^`#\n|]+)", re.MULTILINE)
NOT_RUN = {
    "tidemill doctor": "slow; tests/unit/cli/test_doctor.py runs it",
    "tidemill calibrate": "needs a longer run; tests/integration/test_calibrate.py runs it",
    **dict.fromkeys(
        (f"tidemill plan run {recipe}" for recipe in ("@recipe.toml", "@smollm2-addition")),
        "needs a profile; tests/integration/test_calibrate.py runs it",
    ),
    "tidemill model merge RUN FOLDER": "needs an adapter; tests/integration/test_lora.py runs it",
    "tidemill eval --checkpoint runs/mine --compare runs/other": "as the other tidemill eval",
    "tidemill serve": "serves until it is interrupted; tests/integration/test_serve.py runs it",
    "tidemill sandbox serve": "serves until it is interrupted; tests/integration/sandbox runs it",
    "tidemill deploy render": "needs a recipe for a cluster; tests/unit/cli/test_deploy.py runs it",
    "tidemill plan staleness": "needs a table of the user; tests/unit/cli/test_plan.py runs it",
    "tidemill watch": "serves until it is interrupted; tests/unit/cli/test_watch.py runs it",
    **dict.fromkeys(
        (f"tidemill {verb}" for verb in ("pause", "resume", "checkpoint", "stop")),
        "needs a run in progress; tests/integration/test_control.py runs it",
    ),
}
"""Commands in the docs that no test of the docs runs, and why."""
DRY = ("train", "eval", "generate", "simulate")
WITH_COMMANDS = (
    *("README", "docs/reference/commands"),
    *(f"docs/how-to/{name}" for name in ("algorithms", "data", "evaluate", "memory", "pause-and-resume", "plan")),
    *(f"docs/how-to/{name}" for name in ("preemptible-workers", "rewards", "schedules", "stages")),
)


def documented_commands() -> list[str]:
    pages = (REPOSITORY / f"{name}.md" for name in WITH_COMMANDS)
    text = "\n".join(page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages)
    commands = dict.fromkeys(" ".join(found.split()) for found in COMMAND.findall(text))
    return [each for each in commands if len(each.split()) > 2 or each.split()[1] in ("algorithms", "doctor")]


def reason_not_to_run(command: str) -> str:
    """From `NOT_RUN`; empty if the command runs."""
    return next((why for each, why in NOT_RUN.items() if command == each or command.startswith(f"{each} ")), "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user")
    prepare_folder(path)
    return path


def prepare_folder(path: Path) -> None:
    """Make a data file and the runs that the docs name."""
    (path / "my.jsonl").write_text("\n".join(f'{{"prompt": "{a}+1=", "answer": "{a + 1}"}}' for a in range(9)))
    small = {"trainer.steps": 1, "trainer.threads": 1, "model.char.layers": 1, "batch.prompts": 2, "eval.prompts": 4}
    tidemill.train("char-addition", overrides=small, run_dir=path / "runs" / "mine")
    for name in ("addition", "demo"):
        shutil.copytree(path / "runs" / "mine", path / "runs" / name)


def arguments_of(command: str) -> list[str]:
    """Those of `tidemill`. What a training or a simulation computes is tested elsewhere."""
    words = shlex.split(command.replace("WORD", "kl_beta"))
    assert words[0] == "tidemill"
    if words[1] in DRY and not {"--help", "--dry-run"} & set(words):
        words.append("--dry-run")
    return words[1:]


# tests/unit/cli/test_plan.py plans these recipes, with one simulation.
LONG = ("tidemill plan run", "tidemill plan placement")
COMMANDS = [
    pytest.param(each, marks=pytest.mark.slow) if each.startswith(LONG) else each for each in documented_commands()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_works_as_printed(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := reason_not_to_run(command):
        pytest.skip(why)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    ran = run_here(*arguments_of(command))
    assert ran.code == 0, ran.err


SERVING = code_blocks(HOW_TO / "serve.md")


def test_the_rows_of_the_recipe_for_sessions_can_be_split(tmp_path: Path) -> None:
    for block in SERVING:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    spec = load_spec([f"@{tmp_path / 'agents.toml'}"])
    task = build_task(spec.task, codec=chat_codec(CHATML), batch_prompts=spec.batch.prompts, seed=0, chat_template=True)
    assert spec.gateway.sessions
    assert task.train_size >= spec.batch.prompts
    assert task.held_out_size > 0


def test_the_clients_of_a_served_model_know_all_their_names(tmp_path: Path) -> None:
    """Their packages are not installed here; `make test-sdks` runs agents of the same kind."""
    for number, block in enumerate(block for block in SERVING if block.language == "python"):
        (tmp_path / f"client_{number}.py").write_text(block.text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F,E9", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow  # `make test-docs` runs it
def test_the_examples_are_typed(tmp_path: Path) -> None:
    files = []
    for number, example in enumerate(EXAMPLES):
        file = tmp_path / f"example_{number}.py"
        file.write_text(str(example.values[0]))
        files.append(str(file))
    command = [sys.executable, "-m", "mypy", *files]  # strict, with the cache that `make check` leaves
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout


def test_the_first_example_is_short() -> None:
    (source,) = (str(each.values[0]) for each in EXAMPLES if each.id == "README-0")
    assert len(source.splitlines()) <= 40
