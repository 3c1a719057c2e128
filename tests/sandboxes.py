"""Sandboxes in tests, and other users to run tests as."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from functools import cache
from pathlib import Path

import pytest

from tidemill.sandbox import local
from tidemill.sandbox.command import KILL_S, kill_tree

REPOSITORY = Path(__file__).resolve().parents[1]
OTHER_USER = 4321
PROBES_DEADLINE_S = 300.0


def skip(why: str) -> None:
    """Skip a test, unless `TIDEMILL_TEST_ALL_SANDBOXES` says that it must run here."""
    if os.environ.get("TIDEMILL_TEST_ALL_SANDBOXES"):
        pytest.fail(why)
    pytest.skip(why)


def need_bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        skip("bubblewrap is not installed")


def close_launchers() -> None:
    """End all sandboxes of this process."""
    while local._launchers:
        local._launchers.popitem()[1].close()


def kill_launcher() -> None:
    """Kill the launcher of this process, and wait for its end."""
    killed = local.launcher("bwrap")
    kill_tree(killed.pid)
    deadline = time.monotonic() + KILL_S
    while killed.alive:
        assert time.monotonic() < deadline, "it lives"
        time.sleep(0.01)


def command_as(user: str, program: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a Python module or file, as the user of this process or as another one."""
    folders = [str(REPOSITORY), str(REPOSITORY / "src")]
    environment = {**os.environ, "PYTHONPATH": ":".join(folders), "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    if user == "this":
        return [sys.executable, program, *arguments], environment
    if os.getuid() != 0:
        skip("only root can become another user")
    python = _python_of_all()
    environment["PYTHONPATH"] = ":".join([*folders, sysconfig.get_path("purelib")])
    identity = [f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    return ["setpriv", *identity, "env", python, program, *arguments], environment


def _python_of_all() -> str:
    """An interpreter of this version that every user may run."""
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        # `env`: setpriv itself still has root's right to run any file.
        test = ["setpriv", f"--reuid={OTHER_USER}", "--clear-groups", "env", path, "-c", ""]
        if subprocess.run(test, capture_output=True, check=False).returncode == 0:
            return path
    skip("no interpreter of this version that other users may run")
    raise AssertionError


@cache
def probe_results(backend: str, user: str, names: tuple[str, ...]) -> dict[str, str]:
    """What each probe of `tests/integration/sandbox/probes.py` printed, by its name."""
    program = str(REPOSITORY / "tests/integration/sandbox/run_probes.py")
    command, environment = command_as(user, program, backend, json.dumps(names))
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROBES_DEADLINE_S, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found
