"""Hosts of episodes: processes, or threads for classes that another process cannot import.

A host makes the calls of one episode at a time, so that killing it interrupts no other call; the other episodes that it
holds are restored in another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import DeadlineError
from tidemill.envs.agents.instances import Instances, Outcome, Work
from tidemill.envs.agents.process_server import LENGTH_BYTES, PROCESS, Command, Setup, server_command
from tidemill.extensions.calls import CallError, CallTimeout, HangingError, UserCalls

START_DEADLINE_S = 300.0
"""As long as an import may take (`extensions.loading`)."""
CLOSE_S = 10.0
STDERR = 2
THREAD_S = 86_400.0
"""Deadline of a thread's call; the pool abandons it much earlier."""
# One thread for each process, and the same order of sets in every session.
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class LostError(Exception):
    """A host has ended, or did not start."""


class Host:
    """Makes calls for episodes."""

    def __init__(self) -> None:
        self.alive = True
        self.started = False
        self.episodes: set[int] = set()  # that it holds
        self.turn = asyncio.Lock()  # held while it makes the calls of one episode
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()

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
        if found.index == PROCESS and found.text:
            self.alive = False
            raise LostError(found.text)
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
        invoke, convert = partial(self._instances.invoke, work), partial(self._instances.outcome, work)
        try:
            found = await self._calls.call(invoke, convert=convert, timeout_s=THREAD_S)
        except CallError as error:
            found = self._instances.failed(work, str(error))
        except (CallTimeout, HangingError):
            found = Outcome(index=PROCESS, text="too many earlier calls hang")
        self._outcomes.put_nowait(found)

    def kill(self) -> None:
        super().kill()
        for task in self._tasks:
            task.cancel()


class ProcessLauncher:
    """Hosts that are processes, forked by a server (`process_server`) that is started on first use."""

    def __init__(
        self, environment: str, params: dict[str, Any], longest: int, sandbox: SandboxConfig | None = None
    ) -> None:
        self._environment, self._params, self._longest, self._sandbox = environment, params, longest, sandbox
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._numbers = itertools.count(1)

    def host(self) -> Host:
        return ProcessHost(self, next(self._numbers))

    def fork(self, number: int, stream: socket.socket) -> None:
        """Start a process that serves a socket.

        Raises:
            OSError: the server does not run.
        """
        command = [msgspec.json.encode(Command(process=number))]
        try:
            socket.send_fds(self._control or self._start(), command, [stream.fileno()])
        except ConnectionError:  # it has ended, and with it all processes
            socket.send_fds(self._start(), command, [stream.fileno()])

    def kill(self, number: int) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # the server has ended, or the launcher is closed
                self._control.send(msgspec.json.encode(Command(process=number, kill=True)))

    async def close(self) -> None:
        if self._control is None or self._server is None:
            return
        self._control.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_S
        while self._server.poll() is None:
            if loop.time() > deadline:
                self._server.kill()
                raise DeadlineError("the end of environment processes", waited_s=CLOSE_S, look_at="ps -ef")
            await asyncio.sleep(0.005)

    def _start(self) -> socket.socket:
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.wait(CLOSE_S)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = Setup(
            parent=os.getpid(),
            path=tuple(str(Path(each).absolute()) for each in sys.path),
            environment=self._environment,
            params=self._params,
            longest=self._longest,
            sandbox=self._sandbox.model_dump_json() if self._sandbox else "",
        )
        with theirs:
            self._server = subprocess.Popen(
                server_command(str(theirs.fileno()), setup),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                env={**os.environ, **SETTINGS},
                start_new_session=True,
            )
        return self._control


class ProcessHost(Host, asyncio.Protocol):
    """A process, and the connection to it."""

    def __init__(self, launcher: ProcessLauncher, number: int) -> None:
        super().__init__()
        self._launcher, self._number = launcher, number
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Outcome)

    async def start(self) -> None:
        await super().start()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._launcher.fork(self._number, theirs)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, ours)
            await self.outcome(START_DEADLINE_S)
        except (OSError, TimeoutError) as error:
            ours.close()
            raise LostError(f"its process did not start: {str(error) or 'no answer'}") from error

    def send(self, works: Sequence[Work]) -> None:
        data = msgspec.msgpack.encode(works)
        assert self._transport is not None
        self._transport.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)

    def kill(self) -> None:
        super().kill()
        self._launcher.kill(self._number)
        if self._transport is not None:
            self._transport.abort()

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
        self._outcomes.put_nowait(Outcome(index=PROCESS, text="its process has ended"))
