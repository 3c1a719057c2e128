"""Hosts of episodes: processes, or threads for classes that another process cannot import.

A host makes the calls of one episode at a time, so that killing it interrupts no other call; the other episodes that it
holds are restored in another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tidemill.core.errors import DeadlineError
from tidemill.envs.agents.instances import Instances, Outcome, Work
from tidemill.envs.agents.process_server import LENGTH_BYTES, READY, Command, Ended, Setup, server_command
from tidemill.extensions.calls import CallError, CallTimeout, HangingError, UserCalls

START_DEADLINE_S = 300.0
"""As long as an import may take (`extensions.loading`)."""
STATUS_S = 1.0
"""Wait for the exit code of a process whose socket has closed."""
CLOSE_S = 10.0
STDERR = 2
THREAD_S = 86_400.0
"""Deadline of a thread's call; the pool abandons it much earlier."""


class LostError(Exception):
    """A host has ended, or did not start."""


class Host:
    """Makes calls for episodes."""

    def __init__(self) -> None:
        self.alive = True
        self.started = False
        self.episodes: set[int] = set()  # that it holds
        self.turn = asyncio.Lock()  # held while it makes the calls of one episode
        self._outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue()  # None: it has ended

    async def start(self) -> None:
        """Raises LostError: it did not start."""
        self.started = True

    def send(self, works: Sequence[Work]) -> None:
        """Start calls, all at the same time."""
        raise NotImplementedError

    async def outcome(self, timeout_s: float) -> Outcome:
        """The next outcome of a call.

        Raises:
            LostError: the host has ended.
            TimeoutError: none within `timeout_s` seconds.
        """
        if self._outcomes.empty():
            async with asyncio.timeout(timeout_s):
                found = await self._outcomes.get()
        else:
            found = self._outcomes.get_nowait()
        if found is None:
            self.alive = False
            raise LostError(await self._cause())
        return found

    async def make(self, work: Work, timeout_s: float) -> Outcome:
        """Make one call.

        Raises:
            LostError: the host ended, also because the call did not return in time.
        """
        self.send([work])
        try:
            return await self.outcome(timeout_s)
        except TimeoutError:
            self.kill()
            raise LostError(f"{work.method} did not return within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.kill()
            raise

    def kill(self) -> None:
        """End it with everything that it started. Does not wait."""
        self.alive = False

    async def _cause(self) -> str:
        return "too many earlier calls hang"


class Launcher(Protocol):
    """Makes hosts for one class."""

    def host(self) -> Host:
        """A host that has not been started."""

    async def close(self) -> None:
        """End all hosts."""


class ThreadLauncher:
    """Hosts on threads of this process, for classes of a notebook or script. A call past its deadline is abandoned: it
    cannot be killed."""

    def __init__(self, make_instances: Callable[[], Instances]) -> None:
        self._make_instances = make_instances
        self._calls = UserCalls()

    def host(self) -> Host:
        return ThreadHost(self._make_instances(), self._calls)

    async def close(self) -> None:
        await self._calls.close()


class ThreadHost(Host):
    def __init__(self, instances: Instances, calls: UserCalls) -> None:
        super().__init__()
        self._instances, self._calls = instances, calls
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, works: Sequence[Work]) -> None:
        for work in works:
            task = asyncio.create_task(self._make(work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _make(self, work: Work) -> None:
        found: Outcome | None = None
        convert = partial(self._instances.outcome, work)
        try:
            found = await self._calls.call(partial(self._instances.invoke, work), convert=convert, timeout_s=THREAD_S)
        except CallError as error:
            found = self._instances.failed(work, str(error))
        except (CallTimeout, HangingError):
            pass
        self._outcomes.put_nowait(found)

    def kill(self) -> None:
        super().kill()
        for task in self._tasks:
            task.cancel()


class ProcessLauncher:
    """Hosts that are processes, forked by a server (`process_server`) that is started on first use."""

    def __init__(self, environment: str, params: dict[str, Any], longest: int) -> None:
        self._environment, self._params, self._longest = environment, params, longest
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._numbers = itertools.count(1)
        self.statuses: dict[int, asyncio.Future[int]] = {}  # of processes by number

    def host(self) -> Host:
        return ProcessHost(self, next(self._numbers))

    def fork(self, number: int, stream: socket.socket) -> None:
        """Start a process that serves a socket.

        Raises:
            OSError: the server does not run.
        """
        if self._control is None:
            self._start()
        assert self._control is not None
        socket.send_fds(self._control, [msgspec.json.encode(Command(process=number))], [stream.fileno()])

    def kill(self, number: int) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # the server has ended, and with it all processes
                self._control.send(msgspec.json.encode(Command(process=number, kill=True)))

    def _start(self) -> None:
        if self._server is not None:
            self._server.wait(CLOSE_S)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = Setup(
            parent=os.getpid(),
            path=tuple(str(Path(each).absolute()) for each in sys.path),
            environment=self._environment,
            params=self._params,
            longest=self._longest,
        )
        # One thread for each process, and the same order of sets in every session.
        settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with theirs:
            self._server = subprocess.Popen(
                server_command(str(theirs.fileno()), setup),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                env={**os.environ, **settings},
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._read)

    def _read(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect()
            return
        ended = msgspec.json.decode(data, type=Ended)
        if (waiting := self.statuses.get(ended.process)) is not None and not waiting.done():
            waiting.set_result(ended.status)

    def _disconnect(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    async def close(self) -> None:
        self._disconnect()
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_S
        while self._server.poll() is None:
            if loop.time() > deadline:
                self._server.kill()
                raise DeadlineError("the end of environment processes", waited_s=CLOSE_S, look_at="ps -ef")
            await asyncio.sleep(0.005)


class ProcessHost(Host, asyncio.Protocol):
    """A process, and the connection to it."""

    def __init__(self, launcher: ProcessLauncher, number: int) -> None:
        super().__init__()
        self._launcher, self._number = launcher, number
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Outcome)
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        await super().start()
        ours, theirs = socket.socketpair()
        self._launcher.statuses[self._number] = self._status
        try:
            with theirs:
                self._launcher.fork(self._number, theirs)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, ours)
            ready = await self.outcome(START_DEADLINE_S)
        except asyncio.CancelledError:
            self.kill()
            raise
        except (OSError, TimeoutError) as error:
            self.kill()
            raise LostError(f"its process did not start: {str(error) or 'no answer'}") from error
        assert ready.index == READY
        if ready.error:
            self.kill()
            raise LostError(f"its process did not start: {ready.text}")

    def send(self, works: Sequence[Work]) -> None:
        data = msgspec.msgpack.encode(works)
        assert self._transport is not None
        self._transport.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)

    def kill(self) -> None:
        super().kill()
        self._launcher.kill(self._number)
        if self._transport is not None:
            self._transport.abort()
        self._launcher.statuses.pop(self._number, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if len(self._received) < end:
                return
            self._outcomes.put_nowait(self._decoder.decode(bytes(self._received[LENGTH_BYTES:end])))
            del self._received[:end]

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        self._outcomes.put_nowait(None)

    async def _cause(self) -> str:
        try:
            async with asyncio.timeout(STATUS_S):
                status = await asyncio.shield(self._status)
        except TimeoutError:
            return "its process has ended"
        self._launcher.statuses.pop(self._number, None)
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended with exit code {status}"
