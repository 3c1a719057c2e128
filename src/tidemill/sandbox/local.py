"""Sandboxes of this machine, all of them made by one launcher per process."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tidemill.core import ipc
from tidemill.core.errors import UserError
from tidemill.sandbox.bubblewrap import find_program, launcher_options
from tidemill.sandbox.launcher import PROGRAM, READY
from tidemill.sandbox.messages import Backend, Request, Setup, receive, send
from tidemill.sandbox.records import Finished, Limits, SandboxError, SandboxLostError, Snapshot, check_command

T = TypeVar("T")
NONE = type(None)

START_S = 30.0
ANSWER_S = 30.0
"""Deadline of the launcher beyond that of a command."""


@dataclass(frozen=True)
class SandboxedProgram:
    """A program that runs in a sandbox."""

    stream: socket.socket  # its standard input and output
    finish: Callable[[float], Finished]  # given a deadline in seconds; raises SandboxLostError

    def last_words(self, wait_s: float) -> str:
        """Why it ended: its limit, or the last line of its errors; empty if it has not ended."""
        try:
            finished = self.finish(wait_s)
        except SandboxError:
            return ""
        return f"ended by its limit of {finished.ended}" if finished.ended else last_line(finished.stderr)


def last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or [""])[-1]


class LocalSandbox:
    """A sandbox of this machine; implements `Sandbox`."""

    def __init__(
        self, address: str, limits: Limits, network: tuple[str, ...] = (), visible: Mapping[str, str] = {}
    ) -> None:
        self._address, self._limits = address, limits
        self._lock, self._owner, self._started = threading.Lock(), os.getpid(), False
        self._connection: socket.socket | None = _connect(address)
        try:
            self._call(Request(method="open", limits=limits, network=network, visible=dict(visible)), NONE)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] = {},
        timeout_s: float | None = None,
    ) -> Finished:
        check_command(argv, env)
        if not isinstance(stdin, bytes):
            raise TypeError(f"standard input is bytes, not {type(stdin).__name__}; use text.encode()")
        request = Request(method="run", argv=tuple(argv), stdin=stdin, env=dict(env), timeout_s=timeout_s or 0.0)
        return self._call(request, Finished, min(timeout_s or self._limits.wall_s, self._limits.wall_s))

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] = {}) -> SandboxedProgram:
        """Start a program, which has no limit of time and ends with the sandbox. No other command runs meanwhile."""
        check_command(argv, env)
        stream, name = _connect(self._address), secrets.token_hex(8)
        try:
            send(stream, Request(method="attach", stream=name))
            receive(stream, NONE)
            stream.settimeout(None)  # a program may be silent for long
            with self._lock:
                if self._connection is None:
                    raise SandboxLostError("the sandbox is closed")
                send(self._connection, Request(method="start", argv=tuple(argv), env=dict(env), stream=name))
                self._started = True
        except (OSError, SandboxError) as error:
            stream.close()
            if isinstance(error, SandboxError):
                raise
            raise SandboxLostError(f"the sandbox is lost: {error}") from error
        return SandboxedProgram(stream=stream, finish=self._finish)

    def _finish(self, wait_s: float) -> Finished:
        """How the program ended. Raises SandboxLostError."""
        with self._lock:
            connection = self._connection
            if connection is None:
                raise SandboxLostError("the sandbox is closed")
            try:
                connection.settimeout(wait_s)
                return receive(connection, Finished)
            except OSError as error:
                raise SandboxLostError(f"the program has not ended: {error}") from error

    def read(self, path: str) -> bytes:
        return self._call(Request(method="read", path=path), bytes)

    def write(self, path: str, data: bytes) -> None:
        if not isinstance(data, bytes):
            raise TypeError(f"a file's content is bytes, not {type(data).__name__}; use text.encode()")
        self._call(Request(method="write", path=path, data=data), NONE)

    def snapshot(self) -> Snapshot:
        return self._call(Request(method="snapshot"), Snapshot)

    def restore(self, snapshot: Snapshot) -> None:
        self._call(Request(method="restore", data=snapshot.data), NONE)

    def close(self) -> None:
        connection, self._connection = self._connection, None  # at once: a call on another thread may close, too
        if connection is not None:
            if self._owner == os.getpid():  # else the sandbox is that of the process that this one was forked from
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _call(self, request: Request, kind: type[T], longest_s: float = 0.0) -> T:
        with self._lock:
            connection = self._connection
            if connection is None:
                raise SandboxLostError("the sandbox is closed")
            if self._started:
                raise SandboxError("a program runs in this sandbox")
            try:
                connection.settimeout(longest_s + ANSWER_S)
                send(connection, request)
                return receive(connection, kind)
            except OSError as error:
                self.close()
                raise SandboxLostError(f"the sandbox is lost: {str(error) or 'no answer'}") from error


class LauncherProcess:
    """The launcher that this process has started."""

    def __init__(self, backend: Backend) -> None:
        for name in {"none": (), "bwrap": ("bwrap",), "runsc": ("bwrap", "runsc")}[backend]:
            find_program(name)
        self.address = f"tidemill-sandbox-{secrets.token_hex(16)}"
        path = tuple(str(Path(each).absolute()) for each in sys.path)
        setup = Setup(backend=backend, address=self.address, path=path)
        program = [sys.executable, "-c", PROGRAM, msgspec.json.encode(setup).decode()]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process
        pipes: dict[str, Any] = {
            "bufsize": 0,
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self._errors,
        }
        if backend == "none":
            self._process = subprocess.Popen(program, cwd="/", **pipes)
        else:
            with tempfile.TemporaryFile() as options:  # too long for a list of processes that people read
                options.write(b"".join(each.encode() + b"\0" for each in launcher_options()))
                options.seek(0)
                command = [find_program("bwrap"), "--args", str(options.fileno()), "--", *program]
                self._process = subprocess.Popen(command, cwd="/", pass_fds=[options.fileno()], **pipes)
        self.owner = os.getpid()
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self.owner != os.getpid() or self._process.poll() is None

    def close(self) -> None:
        """End all sandboxes."""
        if self.owner != os.getpid():
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        ipc.wait_or_kill(self._process, START_S)
        self._process.stdout.close()
        self._errors.close()

    def leave(self) -> None:
        """Let a forked process use the launcher without keeping it alive."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        ready, _, _ = select.select([output], [], [], START_S)
        if ready and os.read(output, len(READY)) == READY:
            return
        self._process.kill()
        self._errors.seek(0)
        error = last_line(self._errors.read()) or "the launcher did not answer"
        raise UserError(
            f"sandboxes cannot be started: {error}",
            where="sandbox.backend",
            hint="`tidemill doctor` says which back-ends work here, and why the others do not",
        )


_launchers: dict[Backend, LauncherProcess] = {}
_lock = threading.Lock()


def launcher(backend: Backend) -> LauncherProcess:
    """The launcher of this process, started on first use. A forked process shares that of its parent.

    Raises:
        UserError: the back-end does not work on this machine.
    """
    with _lock:
        found = _launchers.get(backend)
        if found is not None and not found.alive:
            found.close()
            found = None
        if found is None:
            found = _launchers[backend] = LauncherProcess(backend)
        return found


def _after_fork() -> None:
    for each in _launchers.values():
        each.leave()


os.register_at_fork(after_in_child=_after_fork)


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_S)
    try:
        connection.connect("\0" + address)
    except OSError as error:
        connection.close()
        raise SandboxLostError(f"the launcher of sandboxes has ended: {error}") from error
    return connection
