"""A connection to an adapter's program, in a process of its own or in a sandbox (`programs/adapter_program`)."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import socket
import subprocess
import tarfile
import tempfile
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tidemill.agents.adapters.install import PROGRAMS, adapter_python
from tidemill.agents.environment import AgentMistake, ProgramLostError
from tidemill.config.sandbox import SandboxConfig
from tidemill.core import ipc
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.sandbox.local import last_line
from tidemill.sandbox.open_sandbox import open_local_sandbox
from tidemill.sandbox.records import SandboxError, Snapshot

TELL_S, START_S = 10.0, 120.0
CALL_S = 600.0
"""Deadlines; a slow start is told before. A call's own deadline (`env.call_timeout_s`) is shorter."""
CLOSE_S = 5.0
MOST_BYTES = 1 << 28
log = logging.getLogger(__name__)
NOT_FOR_THE_PROGRAM = ("files", "forward", "server_python")
"""Parameters that the program is not given."""


class ProgramReply(Record):
    """What a program says of a call; its number is 0 when it is ready."""

    id: int
    value: Any = None
    error: str | None = None
    fault: bool = False


class Connection:
    """A running program, which answers calls of several threads at the same time.

    Args:
        name: of the adapter.
        params: arguments of its program; besides, `files`: folder that is copied into the sandbox, where the program
            starts; `forward`: names of environment variables that it is given in the sandbox; `server_python`: another
            interpreter that it uses there.
        python: see `adapter_python`.
        sandbox: it runs in a sandbox with these settings; None: in a process of this user.

    Raises:
        UserError: it is not installed, or does not start.
    """

    def __init__(
        self, name: str, params: dict[str, Any], *, python: str = "", sandbox: SandboxConfig | None = None
    ) -> None:
        self._name, self._hint = name, f"`tidemill env show {name}` lists the parameters"
        program = AdapterProgram(
            python=adapter_python(name, python),
            file=f"serve_{name.replace('-', '_')}.py",
            arguments=json.dumps({key: value for key, value in params.items() if key not in NOT_FOR_THE_PROGRAM}),
            folder=_absolute(params.get("files", ""), "files"),
            env=_forwarded(params.get("forward", "")),
            server_python=_absolute(params.get("server_python", ""), "server_python"),
        )
        try:
            self._transport = _SandboxTransport(program, sandbox) if sandbox else _ProcessTransport(program)
        except SandboxError as reason:
            hint = "`tidemill doctor` says which back-ends work"
            raise UserError(str(reason), where="sandbox.backend", hint=hint) from reason
        self._stream, self._closing = self._transport.stream, False
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self.lost = ""  # why no call can be made any more
        threading.Thread(target=self._receive, daemon=True).start()
        try:
            self.description: dict[str, Any] = self._started()
        except (ProgramLostError, AgentMistake, TimeoutError) as error:
            what = str(error) or f"no answer within {START_S:g} s"
            shut(self._stream)
            if isinstance(error, AgentMistake) and (said := self._transport.said()):
                what += f" ({said})"
            self.close()
            what = f"the {name} environment does not start: {what}"
            raise UserError(what, where="env.params", hint=self._hint) from None

    def _started(self) -> Any:
        """The program's description of itself. Raises ProgramLostError, AgentMistake, TimeoutError."""
        try:
            return self._waiting[0].result(TELL_S)
        except TimeoutError:
            if self._waiting[0].done():
                raise
            log.warning("waiting for the %s environment to start, at most %g s", self._name, START_S)
            return self._waiting[0].result(START_S - TELL_S)

    def call(self, method: str, **arguments: Any) -> Any:
        """The result of a method of the program's adapter.

        Raises:
            AgentMistake: the method raised.
            UserError: the environment failed.
            ProgramLostError: the program has ended, or does not answer.
        """
        number, result = next(self._numbers), Future[Any]()
        self._waiting[number] = result
        data = msgspec.msgpack.encode({"id": number, "method": method, "arguments": arguments})
        try:
            if self.lost:
                raise ProgramLostError(self.lost)
            with self._sending:
                self._stream.sendall(ipc.framed(data))
            return result.result(CALL_S)
        except (OSError, TimeoutError) as error:
            raise ProgramLostError(f"{self._name}: {str(error) or 'no answer'}") from error
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the program."""
        self._closing = True
        self._transport.close()

    def _receive(self) -> None:
        why = "the program has ended"
        try:
            while True:
                answer = msgspec.msgpack.decode(ipc.receive(self._stream, MOST_BYTES), type=ProgramReply)
                future = self._waiting.get(answer.id)
                if future is None or future.done():
                    continue
                if answer.error is None:
                    future.set_result(answer.value)
                elif answer.fault:
                    future.set_exception(UserError(answer.error, where="env.params", hint=self._hint))
                else:
                    future.set_exception(AgentMistake(answer.error))
        except EOFError:
            pass
        except (OSError, ValueError, msgspec.DecodeError) as error:
            why = f"its answer is wrong: {error}"
        said = "" if self._closing else self._transport.said()
        self.lost = f"{why}{f': {said}' if said else ''}"
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ProgramLostError(self.lost))


@dataclass(frozen=True, kw_only=True)
class AdapterProgram:
    python: str  # path of an interpreter in the folder `bin` of its environment
    file: str  # in PROGRAMS
    arguments: str
    folder: str  # it starts in this one, or in a sandbox in a copy; empty: in any
    env: dict[str, str]  # in a sandbox
    server_python: str  # in a sandbox: an interpreter that comes first in PATH; empty: `python`


def _forwarded(names: str) -> dict[str, str]:
    """Raises UserError: one is not set."""
    wanted = [name for each in names.split(",") if (name := each.strip())]
    for missing in [name for name in wanted if name not in os.environ]:
        raise UserError(f"the variable {missing} is not set", where="env.params.forward", hint=f"export {missing}")
    return {name: os.environ[name] for name in wanted}


PATHS = {
    "files": (Path.is_dir, "a folder", "give a folder, relative to the one in which tidemill was started"),
    "server_python": (Path.is_file, "an interpreter", "give the path of bin/python in a virtual environment"),
}


def _absolute(path: str, param: str) -> str:
    """Raises UserError: it does not exist."""
    exists, kind, hint = PATHS[param]
    if path and not exists(Path(path)):
        raise UserError(f"{path} is not {kind}", where=f"env.params.{param}", hint=hint)
    return str(Path(path).absolute()) if path else ""


class _ProcessTransport:
    """A process of this user."""

    def __init__(self, program: AdapterProgram) -> None:
        self.stream, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process
        with theirs:
            ends: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": self._errors}
            argv = [program.python, str(PROGRAMS / program.file), program.arguments]
            self._process = subprocess.Popen(argv, cwd=program.folder or None, **ends)

    def said(self) -> str:
        """The last line of its errors, after its end."""
        try:
            self._process.wait(CLOSE_S)
            self._errors.seek(0)
            return last_line(self._errors.read())
        except (subprocess.TimeoutExpired, ValueError):
            return ""

    def close(self) -> None:
        shut(self.stream)
        ipc.wait_or_kill(self._process, CLOSE_S)
        self._errors.close()


class _SandboxTransport:
    """A program in a sandbox of its own."""

    def __init__(self, program: AdapterProgram, config: SandboxConfig) -> None:
        environment = Path(program.python).parent.parent
        folders = {"python": str(environment), "programs": str(PROGRAMS)}
        if program.server_python:
            folders["server"] = str(Path(program.server_python).parent.parent)
        self._sandbox = open_local_sandbox(config, folders)
        if config.backend != "none":
            folders = {name: f"/mnt/{name}" for name in folders}
        env = {
            "PATH": f"{folders.get('server', folders['python'])}/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        } | program.env
        argv = [
            f"{folders['python']}/bin/{Path(program.python).name}",
            f"{folders['programs']}/{program.file}",
            program.arguments,
        ]
        try:
            if program.folder:
                self._sandbox.restore(_snapshot_of(program.folder))
            self._program = self._sandbox.start(argv, env=env)
        except SandboxError:
            self._sandbox.close()
            raise
        self.stream = self._program.stream

    def said(self) -> str:
        return self._program.last_words(CLOSE_S)

    def close(self) -> None:
        shut(self.stream)
        self._sandbox.close()


def _snapshot_of(folder: str) -> Snapshot:
    """The regular files and folders in a folder. Raises SandboxError: one cannot be read."""
    data = io.BytesIO()
    try:
        with tarfile.open(fileobj=data, mode="w") as archive:
            for entry in sorted(os.scandir(folder), key=lambda each: each.name):
                archive.add(entry.path, entry.name, filter=lambda each: each if each.isfile() or each.isdir() else None)
    except OSError as error:
        raise SandboxError(f"{folder} cannot be copied: {error}") from error
    return Snapshot(data=data.getvalue())


def shut(stream: socket.socket) -> None:
    with suppress(OSError):  # the other end has closed
        stream.shutdown(socket.SHUT_RDWR)
    stream.close()
