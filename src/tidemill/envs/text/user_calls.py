"""Calls of user functions, each under a deadline and on threads that can be abandoned.

All awaitables share it, because clients, locks and semaphores of a user's module belong to the loop that first used
them.

Everything that may run code of the user's is done there: the function itself, an awaitable it returns, the conversion
of its result, and the text of its exception. A call that hangs never holds the caller's event loop or the process's
exit. (The standard executors do not serve: their threads are joined when the interpreter ends.)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import itertools
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tidemill.core.errors import UserError, exception_text

RESPONSE_S = 1.0
"""A loop that runs no callback for so long after a deadline is blocked."""
CLOSE_S = 1.0
"""For cancelled awaitables to end."""


class CallTimeout(Exception):
    """No result within the call's deadline."""


class LoopThread:
    """Started when first needed. A loop that a call blocks is replaced at that call's deadline: the other awaitables on
    it are lost, later ones run on the next loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def wait(self, awaitable: Awaitable[Any], *, timeout_s: float) -> Any:
        """The awaitable's result, or the exception it raised; for callers on other threads.

        Raises:
            CallTimeout: none after `timeout_s` seconds; the awaitable is cancelled. Where the loop is blocked, this
                is raised only when it responds again: meanwhile the caller's thread counts as hanging.
        """
        loop = self._running_loop()
        future = asyncio.run_coroutine_threadsafe(_awaited_outcome(awaitable), loop)
        done, _ = concurrent.futures.wait({future}, timeout=timeout_s)
        if not done:
            future.cancel()
            self._replace_if_blocked(loop)
            raise CallTimeout
        if future.cancelled():
            raise RuntimeError("it was cancelled")
        result, error = future.result()
        if error is not None:
            raise error
        return result

    async def close(self) -> None:
        """Cancel what is awaited and end the thread; awaitables that ignore it keep their thread until the process
        ends."""
        with self._lock:
            loop, thread, self._loop, self._closed = self._loop, self._thread, None, True
        if loop is None or thread is None:
            return
        ending = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_end(), loop))
        done, _ = await asyncio.wait({ending}, timeout=CLOSE_S + RESPONSE_S)
        if done and ending.result():
            thread.join(CLOSE_S)  # it has nothing left to do but return

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="tidemill-reward-loop", daemon=True
                )
                self._thread.start()
            return self._loop

    def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        responded = threading.Event()
        loop.call_soon_threadsafe(responded.set)
        if responded.wait(RESPONSE_S):
            return
        with self._lock:
            if self._loop is not loop:  # another caller has replaced it
                return
            self._loop = None
        responded.wait()
        asyncio.run_coroutine_threadsafe(_end(), loop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


async def _awaited_outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await awaitable, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 -- SystemExit would end the loop
        return None, error


async def _end() -> bool:
    """Stop the running loop once all other tasks have ended; whether they have."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    pending = (await asyncio.wait(tasks, timeout=CLOSE_S))[1] if tasks else set()
    if not pending:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)
    return not pending


T = TypeVar("T")

_numbers = itertools.count(1)


class CallError(Exception):
    """The function raised. The message has the exception's type, its text and the line that raised it."""


class HangingError(Exception):
    """Too many earlier calls still hang; no further thread is spent."""


class _Job:
    """One call, and the future of the loop that waits for it."""

    __slots__ = ("function", "future")

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.function, self.future = function, future


class UserCalls:
    """Runs the user's functions for one event loop: each thread one call at a time, awaitables on one loop thread.

    Args:
        most_hanging: calls abandoned at their deadline that have not returned; with so many of them `call` refuses.
    """

    def __init__(self, *, most_hanging: int) -> None:
        self._most_hanging = most_hanging
        self._hanging = 0
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._loop_thread = LoopThread()
        self._closed = False

    @property
    def hanging(self) -> int:
        """Calls past their deadline that have not returned."""
        return self._hanging

    async def call(self, function: Callable[[], Any], *, convert: Callable[[Any], T], timeout_s: float) -> T:
        """`convert(result)`, where `result` is what `function` returns, awaited if it is awaitable.

        Raises:
            CallError: either of them raised.
            CallTimeout: no result after `timeout_s` seconds; the thread is abandoned, an awaitable is cancelled.
            HangingError: at once, when `most_hanging` calls hang.
        """
        if self._closed:
            raise RuntimeError("closed")
        if self._hanging >= self._most_hanging:
            raise HangingError(f"{self._hanging} earlier calls still hang")
        loop = asyncio.get_running_loop()
        job = _Job(lambda: convert(self._awaited(function, time.monotonic() + timeout_s)), loop.create_future())
        inbox = self._idle.pop() if self._idle else self._start(loop)
        inbox.put(job)
        try:
            done, _ = await asyncio.wait({job.future}, timeout=timeout_s)
        finally:
            if not job.future.done():
                job.future.cancel()
                self._hanging += 1
        if not done:
            raise CallTimeout
        result: T = job.future.result()
        return result

    async def close(self) -> None:
        """End idle threads and cancel what is awaited; calls that hang stay until the process ends."""
        self._closed = True
        for inbox in self._idle:
            inbox.put(None)
        self._idle.clear()
        await self._loop_thread.close()

    def _awaited(self, function: Callable[[], Any], deadline_s: float) -> Any:
        result = function()
        if not inspect.isawaitable(result):
            return result
        return self._loop_thread.wait(result, timeout_s=max(0.0, deadline_s - time.monotonic()))

    def _start(self, loop: asyncio.AbstractEventLoop) -> SimpleQueue[_Job | None]:
        inbox: SimpleQueue[_Job | None] = SimpleQueue()
        _start_daemon(lambda: self._serve(loop, inbox))
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


def call_blocking(function: Callable[[], T], *, timeout_s: float) -> T:
    """What `function` returns, for a caller without an event loop.

    Raises:
        CallError: it raised.
        CallTimeout: it has not returned after `timeout_s` seconds; its thread is abandoned.
        UserError: it raised one.
    """
    outcomes: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
    _start_daemon(lambda: outcomes.put(_outcome(function)))
    try:
        result, error = outcomes.get(timeout=timeout_s)
    except Empty:
        raise CallTimeout from None
    if error is not None:
        raise error
    value: T = result
    return value


def _start_daemon(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=f"tidemill-reward-{next(_numbers)}", daemon=True).start()


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except (CallError, CallTimeout, UserError) as error:
        return None, error
    except BaseException as error:  # noqa: BLE001 -- a thread must report whatever a function of the user's raises
        return None, CallError(exception_text(error) + _place(error))


def _place(error: BaseException) -> str:
    """The last line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
