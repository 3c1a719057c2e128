from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from tests.unit.dashboard.served import make_run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["missing"], "missing: no such run or folder"),
        (["empty"], "empty: no run in this folder"),
        (["run/config.toml"], "config.toml: a file, not a run directory"),
        (["run", "--port", "70000"], "--port: must be from 0 to 65535"),
        (["run", "--port", "x"], "--port"),
        (["run", "--host", "0.0.0.0"], "--host: 0.0.0.0 is open to other machines without tokens"),
        (["run", "--token-file", "none"], "--token-file: none: No such file"),
        (["run", "--token-file", "open"], "chmod 600 open"),
        ([], "RUN_OR_FOLDER"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_is_refused(run: Run, tmp_path: Path, options: list[str], words: str) -> None:
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "open").write_text("read token\n", encoding="utf-8")
    (tmp_path / "open").chmod(0o644)
    ran = run("watch", *options, "--no-open")
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err and "Traceback" not in ran.err


def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tidemill.dashboard.serve", None)
    ran = run("watch", ".")
    assert ran.code == 2
    assert 'pip install "h11' in ran.err and "uvicorn" in ran.err
