"""Calls to Ray and to actors, with deadlines, off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
)

from tidemill.core.errors import TidemillError, TrainerLost
from tidemill.core.protocols import within
from tidemill.runtime.cluster.wire import read_answer

T = TypeVar("T")


LET_GO_S = 5.0
"""What is only tidied up is waited for no longer: where the cluster is gone, nobody answers."""


async def blocking(function: Callable[[], T], *, awaited: str, timeout_s: float) -> T:
    """Call `function` in a daemon thread of its own.

    Raises:
        DeadlineError: it did not return in time; its thread is left to itself.
    """
    waiting = asyncio.shield(asyncio.wrap_future(begun(function, name=awaited)))
    return await within(waiting, timeout_s=timeout_s, awaited=awaited, look_at="the load of this machine")


async def let_go(function: Callable[[], object], *, awaited: str) -> None:
    """Tidy up as far as it goes: whatever goes wrong, or lasts longer than `LET_GO_S`, is of no more interest."""
    with suppress(Exception):
        await blocking(function, awaited=awaited, timeout_s=LET_GO_S)


def begun(function: Callable[[], T], *, name: str) -> Future[T]:
    """Call `function` in a daemon thread of its own, whoever waits for it."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future


Gone = Callable[[str, str], TidemillError]
"""From a cause and a hint, in words, to the error that whoever called should see."""

_OUT_OF_MEMORY = "give it more memory, or lower engine.slots or the microbatch"


class Remote:
    """Calls on one actor.

    Args:
        gone: makes the error of an actor that is no more.
        where: its node in words, asked for when the node has died.
    """

    def __init__(self, handle: Any, *, gone: Gone, where: Callable[[], str] = lambda: "") -> None:
        self.handle, self._gone, self._where = handle, gone, where
        self._ended: TidemillError | None = None

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T:
        """The answer, decoded.

        Raises:
            TidemillError: what the method raised; what `gone` makes of an actor that died, or did not answer in time.
        """
        if self._ended is not None:
            raise self._ended
        blob = await self._settled(self.ask(method, *args), method, timeout_s)
        return read_answer(blob, kind)

    def ask(self, method: str, *args: object) -> asyncio.Future[bytes]:
        """Begin a call; its future is not touched by who stops waiting for it."""
        future: asyncio.Future[bytes] = asyncio.wrap_future(getattr(self.handle, method).remote(*args).future())
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # also when nobody waits any more
        return future

    def kill(self) -> None:
        """End the process now, without restart; every later call raises."""
        self._ended = self._ended or self._gone("it was ended", "")
        # Not waited for: it may be that nothing is left to kill, or nobody to ask for it.
        begun(self._kill, name="the end of an actor")

    def _kill(self) -> None:
        if ray.is_initialized():  # else Ray would begin anew, to have somebody to ask
            ray.kill(self.handle, no_restart=True)

    async def _settled(self, future: asyncio.Future[bytes], method: str, timeout_s: float) -> bytes:
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        if not done:
            raise self._gone(f"it has not answered `{method}` for {timeout_s:.0f} s", "look at its machine and its log")
        try:
            return future.result()
        except RayError as error:
            raise self.end(error) from error

    def end(self, error: RayError) -> TidemillError:
        """Remember an actor's end, as what `gone` makes of it."""
        self._ended = self._ended or self._gone(*describe_ray_error(error, self._where()))
        return self._ended


def describe_ray_error(error: RayError, node: str) -> tuple[str, str]:
    """Cause and hint of an actor's end."""
    text = str(error)
    its_node = f"its node {node}" if node else "its node"
    if isinstance(error, ActorUnschedulableError):
        return "no node has what it asks for", "add a node, or ask for less in [ray]"
    if isinstance(error, OutOfMemoryError):
        return "its node ran out of memory and Ray ended it", _OUT_OF_MEMORY
    if isinstance(error, ActorUnavailableError):
        return f"there is no connection to its process; {its_node} may be gone", ""
    if isinstance(error, RayActorError):
        return _of_actor(error, text, its_node)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}", ""


def _of_actor(error: RayActorError, text: str, its_node: str) -> tuple[str, str]:
    if getattr(error, "preempted", False):
        return f"{its_node} was taken away, as announced", ""
    if "node has died" in text or "node was terminated" in text or "node is dead" in text:
        return f"{its_node} died", "nothing to do if its provider took it; otherwise look at that machine"
    if "killed by `ray.kill`" in text:
        return "it was ended", ""
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        return f"it could not be made: {text.strip().splitlines()[-1]}", "look at the Python environment of its node"
    if "setup hook" in text or "RuntimeEnvSetupError" in text:
        return "its process could not be set up", "install the same version of tidemill[cluster] on every node"
    if "worker process has died" in text or "unexpectedly" in text:
        return "its process was killed (SIGKILL or out of memory)", _OUT_OF_MEMORY
    return f"it died: {text.strip().splitlines()[-1] if text.strip() else 'no reason given'}", ""


def trainer_lost(cause: str, hint: str, *, who: str = "trainer") -> TrainerLost:
    advice = f"\n  {hint}" if hint else ""
    return TrainerLost(
        f"the {who} died: {cause}{advice}\n  run the same command again: the run goes on from its last checkpoint, "
        "with the samples it has"
    )
