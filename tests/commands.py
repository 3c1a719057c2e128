"""Runs the command line in a new process, in a fork, or in this process; the latter two avoid importing torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.forked import Forked
from tidemill.cli.app import main

DEADLINE_S = 100.0


class Ran(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The JSON object on standard output, which must be the only output."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


def run_process(*argv: str, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "") -> Ran:
    """`python -m tidemill ...` in a new process with a deadline."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", *argv],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def run_fork(*argv: str, cwd: Path, env: Mapping[str, str] | None = None) -> Ran:
    """The command in a fork of a process that has imported torch, with a deadline."""
    with Forked(*argv, cwd=cwd, env=env) as process:
        out, err = process.communicate(DEADLINE_S)
    assert process.returncode is not None
    return Ran(process.returncode, out, err)


def run_here(*argv: str) -> Ran:
    """The command in this process; relative paths start at the working directory."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return Ran(code, out.getvalue(), err.getvalue())
