"""Processes of their own that can be killed, stopped and interrupted, without each of them importing torch again."""

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

_servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []


class Forked:
    """A fork of `tests/fork_server.py` that calls `target` with `argv`; has what tests need of `subprocess.Popen`.

    Its end is an interpreter's, with the exit code that `target` returns. It is the first of a session of its own.
    """

    def __init__(
        self,
        *argv: str,
        target: str = COMMAND,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        file_bytes: int | None = None,  # no file may grow beyond
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
            socket.send_fds(_server(), [json.dumps(request).encode()], files)
        self._said = b""
        self.pid = self._next(START_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self.kill()
        self.wait(END_DEADLINE_S)

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; `None` while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._next(timeout)
            self._report.close()
            for at, stream in enumerate(self._streams):
                stream.seek(0)
                self._written[at] = stream.read().decode()
                stream.close()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; what it wrote to standard output and standard error."""
        self.wait(timeout)
        return self._written[0], self._written[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def session(self) -> dict[int, str]:
        """Command lines of the processes of its session that are alive: its own, and of what it started."""
        return command_lines(pid for pid in process_ids() if session_of(pid) == self.pid)

    def _next(self, timeout_s: float) -> int:
        """The next number that the one between reports."""
        self._report.settimeout(timeout_s)
        while b"\n" not in self._said:
            try:
                said = self._report.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked process", timeout_s) from None
            assert said, "the process that forks has ended"
            self._said += said
        number, _, self._said = self._said.partition(b"\n")
        return int(number)


def stop_server() -> None:
    """End the process that forks, where there is one; a fork that is still alive stays."""
    while _servers:
        server, control = _servers.pop()
        control.close()
        server.wait(END_DEADLINE_S)


def _server() -> socket.socket:
    """The way to the process that forks, which is started when it is first needed."""
    if not _servers:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
            server = subprocess.Popen(command, cwd=REPOSITORY, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        _servers.append((server, ours))
    return _servers[0][1]
