"""Runs functions with a deadline, on threads that can be abandoned.

For functions that must share the memory of this process, and those that wait for another one. (Other functions of the
user run in processes: `function_pool`.)

A thread cannot be killed, and code that holds the interpreter's lock stops all threads, the event loop too. While
threads may call user code, a watchdog outside the interpreter ends the process if the event loop does not run for
`WATCHDOG_S`.

All awaitables share one event loop, because clients, locks and semaphores of a user's module belong to the loop that
first used them.

All user code runs on these threads: the function, an awaitable that it returns, the conversion of its result, and the
text of its exception. A call that hangs never blocks the caller's event loop or the exit of the process. (The standard
executors cannot be used: the interpreter joins their threads at exit.)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import inspect
import itertools
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tidemill.core.errors import UserError, exception_text

RESPONSE_S = 1.0
"""A loop that runs no callback for this long after a deadline is considered blocked."""
MAX_HANGING = 64
"""With this number of calls past their deadline, further calls fail at once instead of using more threads."""
CLOSE_S = 1.0
"""Deadline for cancelled awaitables to end."""
STDERR = 2  # `sys.stderr` of a notebook is no file
WATCHDOG_S = 120.0
"""A process whose event loop does not run for this long ends with a traceback of all threads."""


class CallTimeout(Exception):
    """No result within the call's deadline."""


class Watchdog:
    """Ends this process, with a traceback on standard error, if the event loop does not run. It needs no interpreter
    lock, so it also works while a function holds that."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Start watching, unless it watches already."""
        if self._timer is None:
            self._rearm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            faulthandler.cancel_dump_traceback_later()

    def _rearm(self) -> None:
        faulthandler.dump_traceback_later(WATCHDOG_S, exit=True, file=STDERR)
        self._timer = asyncio.get_running_loop().call_later(WATCHDOG_S / 10, self._rearm)


class LoopThread:
    """A thread with an event loop, started on first use. If a call blocks the loop past its deadline, a new loop
    replaces it: its other awaitables are lost, later ones run on the new loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def wait(self, awaitable: Awaitable[Any], *, timeout_s: float) -> Any:
        """The awaitable's result, or the exception it raised; for callers on other threads.

        Raises:
            CallTimeout: none after `timeout_s` seconds; the awaitable is cancelled. If the loop is blocked,
                this is raised once it responds again; until then the caller's thread counts as hanging.
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
        """Cancel all awaitables and end the thread; one that ignores cancellation keeps it until the process ends."""
        with self._lock:
            loop, thread, self._loop, self._closed = self._loop, self._thread, None, True
        if loop is None or thread is None:
            return
        ending = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_end(), loop))
        done, _ = await asyncio.wait({ending}, timeout=CLOSE_S + RESPONSE_S)
        if done and ending.result():
            thread.join(CLOSE_S)  # it only has to return

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
    """Stop the running loop once all other tasks have ended; returns whether they have."""
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
    """Too many earlier calls still hang; no further thread is started."""


@dataclass(slots=True)
class _Job:
    """One call, and the future of the loop that waits for it."""

    function: Callable[[], Any]
    future: asyncio.Future[Any]


class UserCalls:
    """Runs user functions for one event loop: each thread one call at a time, awaitables on one loop thread.

    Args:
        max_hanging: with this number of abandoned calls that have not returned, `call` raises HangingError.
    """

    def __init__(self, *, max_hanging: int = MAX_HANGING) -> None:
        self._most_hanging = max_hanging
        self.hanging = 0  # calls past their deadline that have not returned
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._loop_thread = LoopThread()
        self._watchdog = Watchdog()
        self._closed = False

    async def call(
        self, function: Callable[[], Any], *, convert: Callable[[Any], T], timeout_s: float, watched: bool = False
    ) -> T:
        """`convert(result)`, where `result` is what `function` returns, awaited if it is awaitable.

        Args:
            watched: it is code of the user, which may hold the interpreter's lock: from now on until `close` this
                process ends if the event loop does not run (see `Watchdog`).

        Raises:
            CallError: either of them raised.
            CallTimeout: no result after `timeout_s` seconds; the thread is abandoned, an awaitable is
                cancelled.
            HangingError: `max_hanging` calls hang.
        """
        if self._closed:
            raise RuntimeError("closed")
        if self.hanging >= self._most_hanging:
            raise HangingError(f"{self.hanging} earlier calls still hang")
        if watched:
            self._watchdog.watch()
        loop = asyncio.get_running_loop()
        job = _Job(lambda: convert(self._awaited(function, time.monotonic() + timeout_s)), loop.create_future())
        inbox = self._idle.pop() if self._idle else self._start(loop)
        inbox.put(job)
        try:
            done, _ = await asyncio.wait({job.future}, timeout=timeout_s)
        finally:
            if not job.future.done():
                job.future.cancel()
                self.hanging += 1
        if not done:
            raise CallTimeout
        result: T = job.future.result()
        return result

    async def close(self) -> None:
        """End idle threads and cancel awaitables; calls that hang stay until the process ends."""
        self._closed = True
        self._watchdog.close()
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
            except RuntimeError:  # the loop is closed
                return
            del job, result, error  # release references while idle

    def _finished(self, job: _Job, inbox: SimpleQueue[_Job | None], result: Any, error: Exception | None) -> None:
        if job.future.cancelled():
            self.hanging -= 1
        elif error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        if self._closed:
            inbox.put(None)
        else:
            self._idle.append(inbox)


def call_blocking(function: Callable[[], T], *, timeout_s: float) -> T:
    """The result of `function`, for a caller without an event loop.

    Raises:
        CallError: it raised.
        CallTimeout: it has not returned after `timeout_s` seconds; its thread is abandoned.
        UserError: it raised a UserError.
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


def run_blocking(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a new event loop: in this thread, or in another one if a loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(main())).result()


def _start_daemon(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=f"tidemill-reward-{next(_numbers)}", daemon=True).start()


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except (CallError, CallTimeout, UserError) as error:
        return None, error
    except BaseException as error:  # noqa: BLE001 -- a thread must report whatever a function of the user's raises
        return None, call_error(error)


def call_error(error: BaseException) -> CallError:
    """What a function raised, and where."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, UserError):
        return CallError(str(error))
    return CallError(exception_text(error) + raised_at(error))


def raised_at(error: BaseException) -> str:
    """` (file:line in function)` of the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
