"""Commands that can be killed, stopped and interrupted, in forks of a process that has imported torch.

Functions on several ranks run in forks, too, those of `tests/rank_processes.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.processes import command_lines, process_ids, session_of

REPOSITORY = Path(__file__).resolve().parent.parent
START_DEADLINE_S = 100.0  # as long as a command may take (`tests/commands.py`): the first one waits for the imports
END_DEADLINE_S = 30.0
COMMAND = "tidemill.cli.app:main"

_servers: dict[Path | None, tuple[subprocess.Popen[bytes], socket.socket]] = {}
_live: list[Forked] = []


class Forked:
    """A fork of `tests/fork_server.py` that calls `target` with `argv`; a subset of `subprocess.Popen`.

    It ends like an interpreter, with the exit code that `target` returns, and leads a session.

    Args:
        package: the folder that Tidemill is imported from, instead of the checkout.
        file_bytes: limit on the size of a file.
    """

    def __init__(
        self,
        *argv: str,
        target: str = COMMAND,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        package: Path | None = None,
        file_bytes: int | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._streams = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 (closed by `wait`)
        self._written = ["", ""]
        self._report, theirs = socket.socketpair()
        request = {
            "target": target,
            "argv": argv,
            "cwd": str(cwd or Path.cwd()),
            "env": {**os.environ, **(env or {})},
            "file_bytes": file_bytes,
        }
        with theirs:
            files = [theirs.fileno(), *(stream.fileno() for stream in self._streams)]
            socket.send_fds(_server(package), [json.dumps(request).encode()], files)
        self._received = b""
        self.pid = self._next(START_DEADLINE_S)
        _live.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self.kill()
        self.wait(END_DEADLINE_S)

    def poll(self) -> int | None:
        """The exit code, or minus the signal that killed it; `None` while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._next(timeout)
            _live.remove(self)
            self._report.close()
            for at, stream in enumerate(self._streams):
                stream.seek(0)
                self._written[at] = stream.read().decode()
                stream.close()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until it has ended; returns standard output and standard error."""
        self.wait(timeout)
        return self._written[0], self._written[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def session(self) -> dict[int, str]:
        """Command lines of the live processes of its session: itself and what it started."""
        return command_lines(pid for pid in process_ids() if session_of(pid) == self.pid)

    def _next(self, timeout_s: float) -> int:
        """The next number that `fork_server.attend` sends: first the process id, then the exit code."""
        self._report.settimeout(timeout_s)
        while b"\n" not in self._received:
            try:
                said = self._report.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked process", timeout_s) from None
            assert said, "the fork server has ended"
            self._received += said
        number, _, self._received = self._received.partition(b"\n")
        return int(number)


def kill_forks() -> None:
    """Kill what a failed test left running."""
    while _live:
        _live[-1].__exit__()


def stop_fork_servers() -> None:
    """Stop the fork servers; live forks stay."""
    while _servers:
        _, (server, control) = _servers.popitem()
        control.close()
        server.wait(END_DEADLINE_S)


def _server(package: Path | None) -> socket.socket:
    """Socket of the fork server of a package, which is started on first use."""
    if package not in _servers:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
            environment = {**os.environ, **({"PYTHONPATH": str(package)} if package else {})}
            server = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        _servers[package] = (server, ours)
    return _servers[package][1]
