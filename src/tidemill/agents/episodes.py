"""Calls of an environment outside the turns of a run: its tasks, their first messages, and demonstrations.

They are made in the processes that training uses, each with a deadline. An episode in which a call fails is played
again in a new process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tidemill.agents.environment import Environment
from tidemill.agents.hosts import Host
from tidemill.agents.instances import CallOutcome, Work
from tidemill.agents.placement import EnvironmentHosts, Live
from tidemill.config.agent import EnvConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.extensions.processes import LostError

T = TypeVar("T")
BACKOFF_S = 0.1
"""Wait before the second attempt; doubles with each further one."""


class EpisodeError(Exception):
    """A call failed. The message names its method.

    Args:
        method: of the class, with its name.
    """

    def __init__(self, text: str, method: str) -> None:
        self.method = method
        super().__init__(text)


class EpisodeCalls:
    """The calls of one episode, in its host."""

    def __init__(self, environment: type[Environment], host: Host, key: int, timeout_s: float) -> None:
        self._environment, self._host, self._key, self._timeout_s = environment, host, key, timeout_s
        self.repeatable = True  # whether the episode may be played again

    async def make(
        self,
        method: str,
        arguments: dict[str, Any],
        *,
        timeout_s: float | None = None,
        idempotent: bool = True,
        call_id: str = "",
    ) -> CallOutcome:
        """The outcome of a call that succeeded.

        Args:
            timeout_s: deadline; by default `env.call_timeout_s`.

        Raises:
            EpisodeError: it failed.
        """
        self.repeatable = self.repeatable and idempotent
        name = f"{self._environment.__name__}.{method}"
        work = Work(index=0, episode=self._key, method=method, arguments=json.dumps(arguments), call_id=call_id)
        try:
            outcome = await self._host.make(work, timeout_s or self._timeout_s)
        except LostError as error:
            late = str(error).startswith(f"{method} ")
            raise EpisodeError(f"{self._environment.__name__}.{error}" if late else f"{name}: {error}", name) from error
        if outcome.error:
            text = f"{name} raised {outcome.text}" if outcome.error == "raised" else outcome.text
            raise EpisodeError(text + outcome.tail, name)
        return outcome


class EpisodePlayer:
    """Plays episodes of an environment."""

    def __init__(self, environment: type[Environment], config: EnvConfig, sandbox: SandboxConfig) -> None:
        self._environment, self._config = environment, config
        self._placement = EnvironmentHosts(environment, config, sandbox)
        self._keys = itertools.count(1)

    async def play(self, episode: Callable[[EpisodeCalls], Awaitable[T]], *, attempts: int = 0) -> T:
        """What `episode` returns, which makes the calls of an episode.

        Args:
            attempts: by default `env.attempts`. Calls that must not be repeated have one.

        Raises:
            EpisodeError: all attempts failed; of the last one.
        """
        most = attempts or self._config.attempts
        for attempt in itertools.count(1):
            live, calls = Live(next(self._keys)), None
            try:
                async with self._placement.hold(live, 1) as host:
                    live.answered = 0
                    calls = EpisodeCalls(self._environment, host, live.key, self._config.call_timeout_s)
                    return await episode(calls)
            except (LostError, EpisodeError) as error:
                self._placement.lose(live)
                last = attempt >= most or (calls is not None and not calls.repeatable)
                if last and isinstance(error, LostError):
                    raise EpisodeError(f"{self._environment.__name__}: {error}", self._environment.__name__) from error
                if last:
                    raise
            finally:
                self._placement.release(live)
            await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close all episodes, and end the processes."""
        await self._placement.settle()
        await self._placement.close()
