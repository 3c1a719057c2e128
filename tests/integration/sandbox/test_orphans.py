"""Nothing of a sandbox outlives the process that opened it, also if that is killed while the sandbox starts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.sandboxes import REPOSITORY, close_launchers, kill_launcher, need_bubblewrap
from tidemill.config.sandbox import SandboxConfig
from tidemill.sandbox import Sandbox, SandboxLostError, local, open_sandbox
from tidemill.sandbox.bubblewrap import SLOTS
from tidemill.sandbox.local import launcher

KILLS = 8
START_S = 0.4
"""Kills fall into this time after the start, in which namespaces are made, and into the same time after it."""
GRACE_S = 2.0
OWNER = """\
import sys
from tidemill.config.sandbox import SandboxConfig
from tidemill.sandbox import open_sandbox
sandbox = open_sandbox(SandboxConfig(backend=sys.argv[1]))
print("open", flush=True)
sandbox.run(["sh", "-c", "setsid sleep 1234.5 & sleep 1234.5"])
"""


def owned(mark: str) -> list[str]:
    """Command lines of processes with a mark in their environment or arguments, and of sleeping ones."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes()
            if b"1234.5" in command or mark.encode() in (folder / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [each for each in found if each]


@pytest.mark.parametrize("backend", ["bwrap", "none"])
def test_no_process_outlives_a_killed_owner(backend: str) -> None:
    if backend == "bwrap":
        need_bubblewrap()
    draw = random.Random(7)
    for number in range(KILLS):
        mark = f"{os.getpid()}-{number}"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "TIDEMILL_ORPHAN_TEST": mark}
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, backend], env=environment, stdout=subprocess.PIPE, start_new_session=True
        )
        with owner:
            if number % 2:
                assert owner.stdout is not None
                assert owner.stdout.readline() == b"open\n"
            time.sleep(draw.uniform(0, START_S))
            owner.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + GRACE_S
        while (left := owned(f"TIDEMILL_ORPHAN_TEST={mark}")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"kill {number}"


def test_a_launcher_outlives_the_thread_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setattr(local, "_launchers", {})
    opened: list[Sandbox] = []
    thread = threading.Thread(target=lambda: opened.append(open_sandbox(SandboxConfig())))
    thread.start()
    thread.join()
    time.sleep(0.2)

    with closing(opened[0]) as sandbox:
        assert sandbox.run(["true"]).code == 0
    close_launchers()


def test_a_closed_sandbox_ends_its_command_and_frees_its_files() -> None:
    need_bubblewrap()
    with closing(open_sandbox(SandboxConfig())) as sandbox:
        sandbox.write("file", b"x")
    with pytest.raises(SandboxLostError, match="closed"):
        sandbox.read("file")


def test_a_sandbox_ends_although_a_forked_process_holds_its_connection() -> None:
    need_bubblewrap()
    sandbox = open_sandbox(SandboxConfig())
    folders = slots()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        sandbox.close()
        deadline = time.monotonic() + GRACE_S
        while slots() == folders and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(slots()) == len(folders) - 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_of_a_fork_closes_nothing_of_its_own() -> None:
    need_bubblewrap()
    launcher("bwrap")

    assert forked(lambda: forked(lambda: 0)) == 0


def slots() -> list[str]:
    """Mounted folders of sandboxes, as the launcher sees them."""
    mounts = Path(f"/proc/{process_of_launcher()}/mounts").read_text().splitlines()
    return [line.split()[1] for line in mounts if SLOTS in line]


def process_of_launcher() -> int:
    """The Python process below bubblewrap's."""
    found = launcher("bwrap").pid
    while below := Path(f"/proc/{found}/task/{found}/children").read_text().split():
        found = int(below[0])
    return found


def forked(work: Callable[[], int]) -> int:
    """The exit code of a forked process; 1 if it lost a file that it opened before."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(OSError):
                code = work()
                os.fstat(file.fileno())
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_killed_launcher_is_reported_and_replaced() -> None:
    need_bubblewrap()
    sandbox = open_sandbox(SandboxConfig())
    kill_launcher()

    with pytest.raises(SandboxLostError, match="lost"):
        sandbox.run(["sleep", "5"])
    with closing(open_sandbox(SandboxConfig())) as another:
        assert another.run(["true"]).code == 0
