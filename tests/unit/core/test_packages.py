from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import REPOSITORY
from tidemill.core import packages
from tidemill.core.packages import DEVELOPMENT, install_command, quoted, requirements

METADATA = """Metadata-Version: 2.4
Name: tidemill
Version: 1.0
Provides-Extra: lora
Provides-Extra: web
Requires-Dist: torch<3,>=2.13
Requires-Dist: old; python_version < '3'
Requires-Dist: peft<0.22,>=0.21; extra == 'lora'
Requires-Dist: serve[http]>=1; extra == 'web'
"""
PROJECT = """[project]
name = "tidemill"
dependencies = ["torch>=2.13,<3"]
[project.optional-dependencies]
lora = ["peft>=0.21,<0.22"]
web = ["serve[http]>=1"]
"""
CALENDAR = ("packaging", "regex")
"""Their first number is the year."""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Tidemill seems to run from, which is not a checkout of it and not installed."""
    monkeypatch.setattr(packages, "CHECKOUT", tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    requirements.cache_clear()
    yield tmp_path
    requirements.cache_clear()


def install(folder: Path) -> None:
    (folder / "site" / "tidemill-1.0.dist-info").mkdir(parents=True)
    (folder / "site" / "tidemill-1.0.dist-info" / "METADATA").write_text(METADATA)


@pytest.mark.parametrize("origin", ["checkout", "wheel", "wheel inside another checkout"])
def test_the_command_names_the_requirements_of_the_extra(elsewhere: Path, origin: str) -> None:
    if origin != "checkout":
        install(elsewhere)
    if origin != "wheel":
        project = PROJECT if origin == "checkout" else PROJECT.replace("tidemill", "other").replace("peft", "x")
        (elsewhere / "pyproject.toml").write_text(project)
    assert [requirement.name for requirement in requirements()[""]] == ["torch"]
    assert install_command("lora") == 'pip install "peft>=0.21,<0.22"'
    assert install_command("web") == 'pip install "serve[http]>=1"'


def test_sources_alone_do_not_know_their_requirements(elsewhere: Path) -> None:
    (elsewhere / "pyproject.toml").write_text("[project\n")
    assert requirements() == {}
    assert install_command("lora") == "install Tidemill with its extra lora"


def test_a_requirement_is_quoted_where_a_shell_needs_it() -> None:
    assert quoted(Requirement("a==1")) == "a==1"
    assert quoted(Requirement("a[b] <3, >=2; extra == 'x'")) == '"a[b]>=2,<3"'


def pins(name: str) -> dict[str, Version]:
    lock = (REPOSITORY / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    found = re.findall(r"^([\w.-]+)==(\S+)$", lock, re.MULTILINE)
    return {package.lower().replace("_", "-"): Version(version) for package, version in found}


RANGES = {
    each.name.replace("_", "-"): each
    for extra, wanted in requirements().items()
    for each in wanted
    if extra != DEVELOPMENT
}


def test_a_range_ends_before_the_first_release_that_was_not_tested() -> None:
    """The next minor release after the highest tested one, or the next year of a calendar version."""
    tested, wide = pins("default") | pins("highest"), {}
    for name, requirement in RANGES.items():
        version = tested.get(name)
        if version is None or "==" in str(requirement.specifier):
            continue
        after = f"{version.major + 1}" if name in CALENDAR else f"{version.major}.{version.minor + 1}"
        if requirement.specifier.contains(after):
            wide[name] = after
    assert wide == {}
    assert [
        name for name, each in RANGES.items() if not {"<", "=="} & {limit.operator for limit in each.specifier}
    ] == []
