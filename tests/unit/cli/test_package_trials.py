from __future__ import annotations

import os
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tidemill.cli import package_trials
from tidemill.cli.package_trials import installed, packages, try_package, try_packages


def test_packages_come_from_the_projects_own_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"": (Requirement("torch<3,>=2"),), "tasks": (Requirement("x[y]==1.0"),), "dev": (Requirement("ruff"),)}
    versions = {"torch": "2.9"}
    monkeypatch.setattr(package_trials, "requirements", lambda: wanted)
    monkeypatch.setattr(package_trials, "installed", versions.get)
    monkeypatch.setattr(package_trials, "try_packages", lambda names: dict.fromkeys(names, "broken"))
    torch_row = {"name": "torch", "wanted": ">=2,<3", "installed": "2.9", "extra": "", "error": "broken", "beside": ""}
    x_row = {"name": "x", "wanted": "==1.0", "installed": None, "extra": "tasks", "error": "", "beside": ""}
    assert packages() == [torch_row, x_row]


def test_a_package_that_fails_crashes_or_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "works.py").write_text("print('imported')")
    (tmp_path / "fails.py").write_text("raise ImportError('no symbol\\nand more')")
    (tmp_path / "crashes.py").write_text("import os; os._exit(11)")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert try_packages(["works", "fails", "crashes", "hangs", "xxhash"], deadline_s=3.0) == {
        "works": "",
        "fails": "ImportError: no symbol",
        "crashes": "the import ended the process with code 11",
        "hangs": "it was not imported within 3 s",
        "xxhash": "",
    }


def test_the_packages_of_an_adapter_are_tried_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_package("peft") == ""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.0")
    assert "99.0" in try_package("peft")


def test_installed() -> None:
    assert installed("pydantic")
    assert installed("no-such-package-anywhere") is None
