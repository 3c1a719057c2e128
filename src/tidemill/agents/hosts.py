"""Hosts of episodes: processes, or threads for classes that a copy in another process would change.

A host makes the calls of one episode at a time, so that killing it interrupts no other call; the other episodes that it
holds are restored in another host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from tidemill.agents.instances import CallOutcome, Instances, Work
from tidemill.core.errors import UserError
from tidemill.extensions.calls import CallError, CallTimeout, HangingError, UserCalls
from tidemill.extensions.processes import ForkedProcess, ForkServer, LostError

THREAD_S = 86_400.0
"""Deadline of a thread's call; the pool abandons it much earlier."""
PROCESS = -1
"""Index of the outcome with the cause of a host's end."""


class Host:
    """Makes calls for episodes."""

    def __init__(self) -> None:
        self.alive = True
        self.started = False
        self.episodes: set[int] = set()  # that it holds
        self.turn = asyncio.Lock()  # held while it makes the calls of one episode
        self._outcomes: asyncio.Queue[CallOutcome] = asyncio.Queue()

    async def start(self) -> None:
        """Raises LostError: it did not start."""
        self.started = True

    def send(self, works: Sequence[Work]) -> None:
        """Start calls, all at the same time."""
        raise NotImplementedError

    async def outcome(self, timeout_s: float) -> CallOutcome:
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

    async def make(self, work: Work, timeout_s: float) -> CallOutcome:
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


class ThreadHost(Host):
    """A thread of this process, for classes that share objects with it; a call past its deadline is abandoned."""

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
            found = await self._calls.call(invoke, convert=convert, timeout_s=THREAD_S, watched=True)
        except CallError as error:
            found = self._instances.failed(work, str(error))
        except UserError as error:
            found = self._instances.failed(work, error)
        except (CallTimeout, HangingError):
            found = CallOutcome(index=PROCESS, text="too many earlier calls hang")
        self._outcomes.put_nowait(found)

    def kill(self) -> None:
        super().kill()
        for task in self._tasks:
            task.cancel()


class ProcessHost(Host):
    """A process of `environment_process`."""

    def __init__(self, server: ForkServer) -> None:
        super().__init__()
        decode = msgspec.msgpack.Decoder(CallOutcome).decode
        self._process = ForkedProcess(server, lambda data: self._outcomes.put_nowait(decode(data)), self._ended)

    async def start(self) -> None:
        await super().start()
        await self._process.start()

    def send(self, works: Sequence[Work]) -> None:
        self._process.send(msgspec.msgpack.encode(works))

    def kill(self) -> None:
        super().kill()
        self._process.kill()

    def _ended(self, how: str) -> None:
        self.alive = False
        self._outcomes.put_nowait(CallOutcome(index=PROCESS, text=how))
