"""Every tutorial runs in a new folder with Tidemill from a wheel: offline, and no process is left."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.site.notebook_execution import execute
from scripts.site.notebooks import TUTORIALS, settings_of, write_notebook
from tests.integration.api.conftest import Distributions, distributions

__all__ = ["distributions"]
PAGES = [path for path in sorted(TUTORIALS.glob("*.md")) if path.stem != "index"]


@pytest.fixture(scope="module")
def package(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a wheel of this checkout."""
    unpacked = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(distributions.wheel).extractall(unpacked)
    return unpacked


@pytest.mark.usefixtures("shared_cache")
@pytest.mark.timeout(960)
@pytest.mark.parametrize("md", PAGES, ids=lambda path: str(path.stem))
def test_the_tutorial_runs(md: Path, package: Path) -> None:
    notebook, page = write_notebook(md), md.read_text(encoding="utf-8")
    execute(notebook, environment={"PYTHONPATH": str(package)}, **settings_of(page))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "assert " in code[-1], "a tutorial ends with a result that its reader can check"


def test_the_package_is_that_of_the_wheel(package: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import tidemill; print(tidemill.__file__)"]
    environment = {"PYTHONPATH": str(package)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(str(package))
