"""Program that forks processes of user code, and ends each of them with everything that it started.

A *service* is the module that the processes run: `preload(settings)` imports the user's code once in the server, so
that a fork takes milliseconds, and returns the ids of processes that it started for all forks; `attend(stream,
settings, role)` serves a socket in a fork, until it closes. If the imports start threads, which do not survive a fork,
or other processes, which forks would share, every process imports the code itself.

Each process is the subreaper of its descendants. When it ends, the server inherits them, and kills them. When the
control socket closes, or the process that started the server dies, all are killed. A process is the first that the
kernel kills when memory runs out. `multiprocessing` is not used: it imports the user's `__main__` again.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core import ipc
from tidemill.core.records import Record

PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[2])["path"]
from tidemill.extensions.fork_server import main
main()
"""
OOM_SCORE_MAX = "1000"
DATA, READY, ENDED = b"d", b"r", b"e"
"""Kinds of messages, their first byte: data of the service; the process is ready; it ended, or did not start, with the
cause as text."""


class Setup(Record):
    """What the processes run."""

    parent: int  # process id
    path: tuple[str, ...]  # sys.path
    service: str  # module
    settings: int  # descriptor of a file with the service's settings
    preload: bool = True


class Command(Record):
    """Sent to the server: fork, with a socket, or kill."""

    process: int  # number given by the client
    kill: bool = False
    role: bytes = b""


def server_command(control: str, setup: Setup) -> list[str]:
    """Command line of the server.

    Args:
        control: number of an inherited socket.
    """
    return [sys.executable, "-c", PROGRAM, control, msgspec.json.encode(setup).decode()]


def send(stream: socket.socket, data: bytes, kind: bytes = DATA) -> None:
    stream.sendall(ipc.framed(kind + data))


def receive(stream: socket.socket) -> bytes | None:
    """The next message of the client; None when it has closed the stream."""
    try:
        return bytes(ipc.receive(stream)[1:])
    except EOFError:
        return None


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.json.decode(sys.argv[2], type=Setup)
    ipc.die_with_parent(signal.SIGTERM, setup.parent)
    ipc.adopt_descendants()
    # Ctrl-C is for the run, which then closes the socket. Programs that user code starts would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    settings = Path(f"/proc/self/fd/{setup.settings}").read_bytes()
    service: Any = importlib.import_module(setup.service)
    helpers: list[int] = []
    if setup.preload:
        helpers = service.preload(settings)
        if len(list(Path("/proc/self/task").iterdir())) > 1 or set(ipc.child_processes()) - {*helpers}:
            ipc.kill_children()
            os.execv(sys.executable, server_command(sys.argv[1], msgspec.structs.replace(setup, preload=False)))
    gc.collect()
    gc.freeze()  # memory stays shared with the forks
    try:
        with suppress(ConnectionResetError):
            _Server(control, service, settings, helpers).serve()
    finally:
        ipc.kill_children()


class _Server:
    def __init__(self, control: socket.socket, service: Any, settings: bytes, helpers: list[int]) -> None:
        self._control, self._service, self._settings = control, service, settings
        self._helpers = set(helpers)
        self._processes: dict[int, tuple[int, socket.socket]] = {}  # process id and its socket, by the client's number

    def serve(self) -> None:
        wake, woken = os.pipe()
        for end in (wake, woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(woken)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # only wakes `select`: an exception could interrupt the killing
        while True:
            ready, _, _ = select.select([self._control.fileno(), wake], [], [])
            if wake in ready:
                if signal.SIGTERM in os.read(wake, 4096):
                    return
                self._reap()
            if self._control.fileno() in ready:
                text, files, _, _ = socket.recv_fds(self._control, 4096, 1)
                if not text:
                    return
                self._obey(msgspec.json.decode(text, type=Command), files)

    def _obey(self, command: Command, files: list[int]) -> None:
        if not command.kill:
            stream = socket.socket(fileno=files[0])
            try:
                self._processes[command.process] = (self._fork(stream, command.role), stream)
            except OSError:  # no process can be started; the client sees that the socket closes
                stream.close()
        elif command.process in self._processes:
            os.kill(self._processes[command.process][0], signal.SIGKILL)

    def _reap(self) -> None:
        """Report processes that have ended, and kill the processes that they left."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for number, (pid, stream) in list(self._processes.items()):
                    if pid == ended[0]:
                        del self._processes[number]
                        _report_end(stream, os.waitstatus_to_exitcode(ended[1]))
        for each in set(ipc.child_processes()) - {pid for pid, _ in self._processes.values()} - self._helpers:
            os.kill(each, signal.SIGKILL)  # its children come next, when its end is reported

    def _fork(self, stream: socket.socket, role: bytes) -> int:
        """Fork a process that serves `stream`."""
        server = os.getpid()
        if pid := os.fork():
            return pid
        try:
            os.close(signal.set_wakeup_fd(-1))
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            ipc.die_with_parent(signal.SIGKILL, server)
            ipc.adopt_descendants()
            os.setsid()  # a function that kills its process group ends no other
            self._control.close()
            os.register_at_fork(after_in_child=stream.close)  # a child of user code that returns must not answer
            with suppress(OSError):  # not in every container
                Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_MAX)
            self._service.attend(stream, self._settings, role)
            os._exit(0)
        finally:
            os._exit(1)


def _report_end(stream: socket.socket, code: int) -> None:
    how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    with stream, suppress(OSError):  # the client has closed it
        stream.setblocking(False)  # nor does a client that does not read stop the server
        send(stream, f"its process {how}".encode(), ENDED)
