"""Daemon threads for blocking calls: one that hangs is left behind and replaced, and never holds up the process's exit.

The standard executors will not do: their threads are joined when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_numbers = itertools.count(1)


class HangingError(Exception):
    """Too many earlier calls still hang; no further thread is spent."""


class _Job:
    """One call, and the future of the loop that waits for it."""

    __slots__ = ("function", "future")

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.function, self.future = function, future


class DaemonThreads:
    """Runs blocking calls for one event loop, each thread one call at a time.

    Args:
        most_hanging: calls left behind at their deadline and not returned yet; beyond them `call` refuses.
    """

    def __init__(self, *, most_hanging: int) -> None:
        self._most_hanging = most_hanging
        self._hanging = 0
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._closed = False

    @property
    def hanging(self) -> int:
        """Calls past their deadline that have not returned."""
        return self._hanging

    async def call(self, function: Callable[[], Any], *, timeout_s: float) -> Any:
        """What `function` returns, or the exception it raises (also SystemExit and the like, as RuntimeError).

        Raises:
            TimeoutError: after `timeout_s` seconds; the thread is left to it.
            HangingError: at once, when as many calls hang as are put up with.
        """
        if self._closed:
            raise RuntimeError("closed")
        if self._hanging >= self._most_hanging:
            raise HangingError(f"{self._hanging} earlier calls still hang")
        loop = asyncio.get_running_loop()
        job = _Job(function, loop.create_future())
        inbox = self._idle.pop() if self._idle else self._start(loop)
        inbox.put(job)
        try:
            done, _ = await asyncio.wait({job.future}, timeout=timeout_s)
        finally:
            if not job.future.done():
                job.future.cancel()
                self._hanging += 1
        if not done:
            raise TimeoutError
        return job.future.result()

    def close(self) -> None:
        """Idle threads end; busy ones end with their call."""
        self._closed = True
        for inbox in self._idle:
            inbox.put(None)
        self._idle.clear()

    def _start(self, loop: asyncio.AbstractEventLoop) -> SimpleQueue[_Job | None]:
        inbox: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(
            target=self._serve, args=(loop, inbox), name=f"tidemill-reward-{next(_numbers)}", daemon=True
        ).start()
        return inbox

    def _serve(self, loop: asyncio.AbstractEventLoop, inbox: SimpleQueue[_Job | None]) -> None:
        while (job := inbox.get()) is not None:
            result, error = _outcome(job.function)
            try:
                loop.call_soon_threadsafe(self._finished, job, inbox, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            del job, result, error  # an idle thread holds on to nothing

    def _finished(self, job: _Job, inbox: SimpleQueue[_Job | None], result: Any, error: Exception | None) -> None:
        if job.future.cancelled():
            self._hanging -= 1
        elif error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        if self._closed:
            inbox.put(None)
        else:
            self._idle.append(inbox)


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 -- a thread must report whatever a reward raises
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return None, error
        return None, RuntimeError(f"{type(error).__name__}: {error}")  # what a future refuses or would end the loop
