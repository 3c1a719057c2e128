"""Which wheels a machine without network lacks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from scripts.gpu_wheels import ROOT, USUAL, listed, locked, missing_packages

DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
LOCK = (ROOT / "locks" / "default.txt").read_text()


def test_what_the_machine_lacks_comes_with_what_that_needs() -> None:
    missing = missing_packages(DEPENDENCIES, USUAL, python="3.12")
    assert {"msgspec", "pydantic", "pydantic-core", "typing-inspection", "httpcore2", "rich-rst"} <= missing
    assert not missing & USUAL
    assert not missing & {"sympy", "networkx", "fsspec"}  # torch's, which the machine has
    pins = locked(missing, LOCK)
    assert pins.keys() == missing
    assert missing_packages(["pydantic"], frozenset({"pydantic"}), python="3.12") == set()


def test_markers_are_those_of_the_machine() -> None:
    assert missing_packages(["tomli; python_version < '3.12'"], frozenset(), python="3.12") == set()


@pytest.mark.parametrize(
    "text",
    [
        "Package    Version\n---------- -------\nHttpx2 2.1\nmy.package 0.1\n",  # pip list
        "Httpx2==2.1\nmy_package==0.1\n",  # pip freeze
    ],
)
def test_packages_of_the_machine_can_be_given(text: str) -> None:
    assert listed(text) == {"httpx2", "my-package"}


def test_a_package_that_is_not_locked_is_named() -> None:
    with pytest.raises(LookupError, match="does not name other"):
        locked(["other"], LOCK)
    with pytest.raises(LookupError, match="no-such-package is not installed here"):
        missing_packages(["no-such-package"], frozenset(), python="3.12")


def test_the_wheels_are_not_part_of_the_repository() -> None:
    assert "/.gpu-wheels/" in Path(ROOT / ".gitignore").read_text().splitlines()
