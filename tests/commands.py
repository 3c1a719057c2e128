"""The command line as a user runs it, in a process of its own; in a fork, or in this one, to spare importing torch."""

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
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The JSON object on standard output, and nothing else there."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


def run_process(*argv: str, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "") -> Ran:
    """`python -m tidemill ...` in a process of its own, ended at a deadline."""
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
    """The same command in a process that has imported everything already, ended at a deadline."""
    with Forked(*argv, cwd=cwd, env=env) as process:
        out, err = process.communicate(DEADLINE_S)
    assert process.returncode is not None
    return Ran(process.returncode, out, err)


def run_here(*argv: str) -> Ran:
    """The same command in this process; relative paths start at the working directory."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return Ran(code, out.getvalue(), err.getvalue())
