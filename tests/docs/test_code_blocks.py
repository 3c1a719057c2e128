"""The code blocks of the docs run as printed. `make check-docs` finds blocks that nothing runs and that give no reason.

Each page has a folder. First its Python blocks run there, in order, as one program; then its bash blocks, in order,
when the folder also has a data file and some runs. A block with `title="NAME"` is a file of the folder. A block of TOML
is a valid recipe. Tutorials are executed as notebooks (`test_tutorials.py`); `test_documented.py` in `integration` runs
the example of README.md and the commands of the pages in `WITH_COMMANDS`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.site.blocks import Block, code_blocks
from scripts.site.notebooks import TUTORIALS
from tests.conftest import REPOSITORY
from tests.docs.page_script import BLOCK_DEADLINE_S as PYTHON_DEADLINE_S
from tests.forked import Forked
from tests.integration.api.test_documented import DRY, WITH_COMMANDS, prepare_folder
from tidemill.config.pipeline import load_recipe

SHELL_DEADLINE_S = 120.0
DOCS = REPOSITORY / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.parent != TUTORIALS or page.stem == "index"]
BLOCKS = {page: code_blocks(page) for page in PAGES}
COMMANDS_RUN_ELSEWHERE = [REPOSITORY / f"{name}.md" for name in WITH_COMMANDS]


def to_run(page: Path, language: str) -> list[Block]:
    """The blocks of a language that give no reason not to run them."""
    return [block for block in BLOCKS[page] if block.language == language and not block.reason]


PYTHON_PAGES = [page for page in PAGES if to_run(page, "python")]
RUN_PAGES = [
    page for page in PAGES if page in PYTHON_PAGES or (to_run(page, "bash") and page not in COMMANDS_RUN_ELSEWHERE)
]
RECIPES = [block for page in PAGES for block in to_run(page, "toml")]
TIDEMILL = f"""#!/bin/bash
# What a training or a simulation computes is tested elsewhere. Its run directory gets a small run, for later commands.
dry=
case "$1" in {"|".join(DRY)}) [[ " $* " == *" --dry-run "* ]] || dry=--dry-run;; esac
{sys.executable} -m tidemill "$@" $dry || exit
[[ $1 == train && $dry ]] || exit 0
while (( $# )); do
  if [[ $1 == --run.dir && ! -e $2 ]]; then mkdir -p "$2" && cp -r "$SMALL_RUN/." "$2"; fi
  shift
done
"""
SHORTER = {
    '"algorithm.kl_beta": 0.04,\n        "trainer.steps": 10,\n': (
        '"algorithm.kl_beta": 0.04,\n        "trainer.steps": 1, "eval.prompts": 2,\n'
    ),
    '"batch.group_size": 4,\n        "trainer.steps": 10,\n': (
        '"batch.group_size": 2,\n        "trainer.steps": 1, "eval.prompts": 2,\n'
    ),
    '"trainer.steps": 10, "batch.group_size": 4': '"trainer.steps": 1, "batch.prompts": 2, "batch.group_size": 2',
    '"trainer.steps": 10,\n': '"trainer.steps": 1, "batch.prompts": 2, "batch.group_size": 2, "eval.prompts": 2,\n',
    '"trainer.steps": 10}': '"trainer.steps": 1, "eval.prompts": 2}',
    '"env.turn_tokens": 48, "sampling.max_new_tokens": 96': '"env.turn_tokens": 8, "sampling.max_new_tokens": 16',
    '"supervised.epochs": 5': '"supervised.epochs": 0',
    '"checkpoint.every_steps": 0,\n}': '"checkpoint.every_steps": 0, "supervised.epochs": 0, "trainer.steps": 1}\n',
    '"trainer.steps": 3,': '"trainer.steps": 1, "batch.prompts": 2, "batch.group_size": 2, "eval.prompts": 2,',
}
"""What makes a block with a pretrained model take long. The replacement has as many lines, so that an error names the
line of the page."""


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS).with_suffix(""))


def place_of(block: Block) -> str:
    return f"{block.page.relative_to(REPOSITORY)}:{block.line}"


def script_of(page: Path) -> tuple[str, list[int]]:
    """The Python blocks of a page as one program with the line numbers of the page, and the line of each block."""
    lines: list[str] = []
    starts = []
    for block in to_run(page, "python"):
        source = block.text
        for written, shorter in SHORTER.items():
            source = source.replace(written, shorter)
        lines += [""] * (block.line - len(lines))
        starts.append(block.line + 1)
        lines += source.splitlines()
    return "\n".join([*lines, ""]), starts


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare_folder(folder)
    return folder


def test_what_shortens_a_block_is_in_a_block() -> None:
    sources = [block.text for page in PYTHON_PAGES for block in BLOCKS[page]]
    assert [written for written in SHORTER if not any(written in source for source in sources)] == []


def test_every_file_that_a_block_shows_is_used_on_its_page() -> None:
    unused = [
        place_of(block)
        for page in PAGES
        for block in BLOCKS[page]
        if block.title and not any(Path(block.title).stem in other.text for other in BLOCKS[page] if other != block)
    ]
    assert unused == []


@pytest.mark.parametrize("block", RECIPES, ids=place_of)
def test_the_recipe_is_valid(block: Block, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(block.text, encoding="utf-8")
    load_recipe([f"@{tmp_path / 'recipe.toml'}"])


@pytest.mark.parametrize("page", RUN_PAGES, ids=name_of)
@pytest.mark.usefixtures("shared_cache")
@pytest.mark.timeout(3000)
def test_the_blocks_run_in_order(page: Path, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for block in BLOCKS[page]:
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
    run_python(page, folder)
    if commands := [] if page in COMMANDS_RUN_ELSEWHERE else to_run(page, "bash"):
        made = [name for block in commands for name in re.findall(r"--run\.dir (\S+)", block.text)]
        fill_in(folder, prepared, without=made)
        for block in commands:
            run_shell(block, folder, programs=tmp_path, small_run=prepared / "runs" / "mine")


def run_python(page: Path, folder: Path) -> None:
    source, starts = script_of(page)
    (folder / "page.py").write_text(source, encoding="utf-8")
    lines = [str(line) for line in starts]
    with Forked("page.py", *lines, target="tests.docs.page_script:main", cwd=folder) as process:
        _, errors = process.communicate(PYTHON_DEADLINE_S * (len(starts) + 1))
    assert process.returncode == 0, f"{page}:\n{errors}"


def fill_in(folder: Path, prepared: Path, *, without: list[str]) -> None:
    """Copy the prepared files and runs, except those that the page makes."""
    for path in (prepared / "my.jsonl", *(prepared / "runs").iterdir()):
        name = path.relative_to(prepared)
        if (folder / name).exists() or str(name) in without:
            continue
        if path.is_dir():
            shutil.copytree(path, folder / name)
        else:
            shutil.copy2(path, folder / name)


def run_shell(block: Block, folder: Path, *, programs: Path, small_run: Path) -> None:
    command = programs / "tidemill"
    command.write_text(TIDEMILL)
    command.chmod(0o755)
    with subprocess.Popen(
        ["bash", "-euc", block.text],
        cwd=folder,
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SMALL_RUN": str(small_run)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            _, errors = shell.communicate(timeout=SHELL_DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, f"{place_of(block)}\n{errors}"


@pytest.mark.timeout(300)
def test_the_python_blocks_are_typed_and_use_what_they_import(tmp_path: Path) -> None:
    """Each page as one file; blocks may define a name again, and leave out types."""
    files = []
    for page in PYTHON_PAGES:
        file = tmp_path / f"{name_of(page).replace('/', '_').replace('-', '_')}.py"
        file.write_text(script_of(page)[0], encoding="utf-8")
        files.append(str(file))
    for checker in (
        ["ruff", "check", "--isolated", "--no-cache", "--select=F,E9", "--ignore=F811"],
        ["mypy", "--disable-error-code=no-redef", "--disable-error-code=no-untyped-def"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *checker, *files],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
