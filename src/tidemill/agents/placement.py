"""Places episodes on hosts, and limits the calls that run at the same time.

Up to four processes for each concurrent call hold one episode each; of a class whose processes are costly, as many as
there are cores. With more live episodes, they share processes, which then wait for each other's turns. Episodes whose
`step` must not be repeated never share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from tidemill.agents.environment import Environment, ToolEnvironment
from tidemill.agents.environment_process import SERVICE, EnvironmentSettings
from tidemill.agents.hosts import Host, ProcessHost, ThreadHost
from tidemill.agents.instances import Instances, Work
from tidemill.config.agent import EnvConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.extensions.calls import UserCalls
from tidemill.extensions.portable import UnportableError, target_of
from tidemill.extensions.processes import ForkServer, LostError
from tidemill.extensions.registry import import_path

HOSTS_PER_CALL = 4
"""Processes for each concurrent call, before episodes share them."""
CHARACTERS_PER_TOKEN = 160
"""Characters of an observation that leave its process, for each token that the model may see of it."""


@dataclass(slots=True)
class Live:
    """An episode that is not over."""

    key: int  # names it in its host
    host: Host | None = None
    answered: int = -1  # turns that its state in the host includes; -1: it has none there
    spent_s: float = 0.0  # in calls, since the pool was made
    broke_host: bool = False  # its own call ended the host that held its state


class EnvironmentHosts:
    """The hosts of one environment.

    Args:
        warn: gets a message if it must run in this process.
    """

    def __init__(
        self,
        environment: type[Environment],
        config: EnvConfig,
        sandbox: SandboxConfig,
        *,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        longest = config.observation_tokens * CHARACTERS_PER_TOKEN
        self._server: ForkServer | UserCalls
        self._new_host: Callable[[], Host]
        try:
            target = target_of(environment, import_path(environment), name=environment.__name__)
        except UnportableError as reason:
            warn(f"{environment.__name__} runs in this process, where it cannot be stopped: {reason}")
            calls = UserCalls()
            self._server = calls
            self._new_host = lambda: ThreadHost(Instances(environment, config.params, longest, sandbox), calls)
        else:
            given = sandbox.model_dump_json() if environment.needs_sandbox else ""
            settings = EnvironmentSettings(environment=target, params=config.params, longest=longest, sandbox=given)
            self._server = ForkServer(SERVICE, msgspec.msgpack.encode(settings))
            self._new_host = partial(ProcessHost, self._server)
        self.exclusive = not issubclass(environment, ToolEnvironment) and not environment.idempotent
        self._most = HOSTS_PER_CALL * config.concurrency
        if environment.costly_process:
            self._most = min(self._most, max(2, os.cpu_count() or 1))
        self._close_s = config.call_timeout_s
        self._hosts: list[Host] = []
        self._permits = asyncio.Semaphore(config.concurrency)
        self._acquiring = asyncio.Lock()  # several permits for one turn, without a deadlock
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def hold(self, live: Live, calls: int) -> AsyncIterator[Host]:
        """The host of an episode, started, and permits for calls.

        Raises:
            LostError: it did not start.
        """
        while True:
            if live.host is None or not live.host.alive:
                live.host, live.answered = self._choose(), -1
                live.host.episodes.add(live.key)
            host = live.host
            await host.turn.acquire()
            if host.alive and live.host is host:
                break
            host.turn.release()
        acquired = 0
        try:
            async with self._acquiring:
                while acquired < calls:
                    await self._permits.acquire()
                    acquired += 1
            if not host.started:
                try:
                    await host.start()
                except BaseException:
                    host.kill()
                    raise
            yield host
        finally:
            for _ in range(acquired):
                self._permits.release()
            host.turn.release()

    def _choose(self) -> Host:
        """A host for one more episode."""
        self._hosts = [host for host in self._hosts if host.alive]
        least = min(self._hosts, key=lambda host: len(host.episodes), default=None)
        full = len(self._hosts) >= self._most and not self.exclusive
        if least is None or (least.episodes and not full):
            least = self._new_host()
            self._hosts.append(least)
        return least

    def lose(self, live: Live) -> None:
        """End the host of an episode, whose call is late or has ended it."""
        if live.host is not None:
            live.host.kill()
        live.host, live.answered, live.broke_host = None, -1, True

    def release(self, live: Live) -> None:
        """Discard the state of an episode."""
        host, stateful = live.host, live.answered >= 0
        live.host, live.answered = None, -1
        if host is None or not host.alive:
            return
        host.episodes.discard(live.key)
        if stateful:
            task = asyncio.get_running_loop().create_task(self._close_episode(host, live.key))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_episode(self, host: Host, key: int) -> None:
        async with host.turn:
            if host.alive:
                with contextlib.suppress(LostError):
                    await host.make(Work(index=0, episode=key, method="close"), self._close_s)

    @asynccontextmanager
    async def fresh_host(self) -> AsyncIterator[Host]:
        """A host that no other episode uses.

        Raises:
            LostError: it did not start.
        """
        host = self._new_host()
        try:
            await host.start()
            yield host
        finally:
            host.kill()

    async def settle(self) -> None:
        """Wait until released episodes are closed, each at most `env.call_timeout_s`."""
        await asyncio.gather(*self._closing)

    async def close(self) -> None:
        """End all hosts."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for host in self._hosts:
            host.kill()
        await self._server.close()
