"""Processes of user code, which a server forks, and kills with everything that they started (`fork_server`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from tidemill.core import ipc
from tidemill.core.errors import DeadlineError
from tidemill.extensions.fork_server import DATA, ENDED, READY, Command, Setup, server_command
from tidemill.extensions.loading import IMPORT_DEADLINE_S

CLOSE_S = 10.0
STDERR = 2
# One thread for each process, and the same order of sets in every session.
VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class LostError(Exception):
    """A process has ended, or did not start."""


class ForkServer:
    """Starts processes that run a service (`fork_server`); the server itself is started on first use.

    Args:
        service: module.
        settings: for the service.
    """

    def __init__(self, service: str, settings: bytes) -> None:
        self._service, self._settings = service, settings
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.numbers = itertools.count(1)  # of processes

    @property
    def pid(self) -> int | None:
        """Process id; None before the first use."""
        return self._server.pid if self._server is not None else None

    def fork(self, given: Command, stream: socket.socket) -> None:
        """Start a process that serves a socket.

        Raises:
            OSError: the server does not run.
        """
        command = [msgspec.json.encode(given)]
        try:
            socket.send_fds(self._control or self._start(), command, [stream.fileno()])
        except ConnectionError:  # it has ended, and with it all processes
            socket.send_fds(self._start(), command, [stream.fileno()])

    def kill(self, number: int) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # the server has ended, or is closed
                self._control.send(msgspec.json.encode(Command(process=number, kill=True)))

    async def close(self) -> None:
        """End all processes.

        Raises:
            DeadlineError: the server does not end.
        """
        if self._control is None or self._server is None:
            return
        self._control.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_S
        while self._server.poll() is None:
            if loop.time() > deadline:
                self._server.kill()
                raise DeadlineError("the end of the processes of user code", waited_s=CLOSE_S, look_at="ps -ef")
            await asyncio.sleep(0.005)

    def _start(self) -> socket.socket:
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.wait(CLOSE_S)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = os.memfd_create("tidemill-settings")  # a command line has not enough room for functions by value
        try:
            with open(settings, "wb", closefd=False) as file:
                file.write(self._settings)
            setup = Setup(
                parent=os.getpid(),
                path=tuple(str(Path(each).absolute()) for each in sys.path),
                service=self._service,
                settings=settings,
            )
            with theirs:
                self._server = subprocess.Popen(
                    server_command(str(theirs.fileno()), setup),
                    pass_fds=[theirs.fileno(), settings],
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,
                    env={**os.environ, **VARIABLES},
                    start_new_session=True,
                )
        finally:
            os.close(settings)
        return self._control


class ForkedProcess(asyncio.Protocol):
    """A process, and the connection to it.

    Args:
        received: gets each message; if it raises, the process is lost.
        ended: gets the cause when the process ends, once, unless it is killed.
        role: for the service.
    """

    def __init__(
        self, server: ForkServer, received: Callable[[bytes], None], ended: Callable[[str], None], *, role: bytes = b""
    ) -> None:
        self.alive = True
        self._command = Command(process=next(server.numbers), role=role)
        self._server, self._receive, self._report_end = server, received, ended
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """
        Raises:
            LostError: it did not start within `IMPORT_DEADLINE_S`.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._server.fork(self._command, theirs)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, ours)
            async with asyncio.timeout(IMPORT_DEADLINE_S):
                await asyncio.shield(self._ready)
        except (OSError, TimeoutError) as error:
            ours.close()
            self.kill()
            raise LostError(f"its process did not start: {str(error) or 'no answer'}") from error

    def send(self, data: bytes) -> None:
        """Does not wait until it is received."""
        assert self._transport is not None
        self._transport.write(ipc.framed(DATA + data))

    def kill(self) -> None:
        """End it with everything that it started. Does not wait, and is not reported."""
        self.alive = False
        self._server.kill(self._command.process)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for message in ipc.take(self._buffer):
            if not self.alive:
                return
            kind = message[:1]
            if kind == DATA:
                self._receive(message[1:])
            elif kind == READY and not self._ready.done():
                self._ready.set_result(None)
            elif kind == ENDED:
                self._end(message[1:].decode(errors="replace"))

    def connection_lost(self, error: Exception | None) -> None:
        self._end("its process has ended")

    def _end(self, how: str) -> None:
        if not self.alive:
            return
        self.alive = False
        if not self._ready.done():
            self._ready.set_exception(LostError(how))
        else:
            self._report_end(how)
