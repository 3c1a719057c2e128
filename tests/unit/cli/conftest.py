"""Commands run in this process, with their runtime replaced: what is tested is the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tidemill.cli.app import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The JSON object on standard output, and nothing else there."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Ran]
Pretend = Callable[[str, str, Callable[..., Any]], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`run("train", "--json")` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where tracebacks of bugs are left

    def call(*argv: str) -> Ran:
        code = main(argv)
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """`pretend("tidemill.jobs.train", "train", function)` puts a module with that function in place."""

    def replace(module: str, name: str, function: Callable[..., Any]) -> None:
        stand_in = ModuleType(module)
        setattr(stand_in, name, function)
        monkeypatch.setitem(sys.modules, module, stand_in)

    return replace
