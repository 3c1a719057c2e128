"""An event loop on a daemon thread, for awaitables that must not block or outlive the caller's own loop.

All awaitables share it, because clients, locks and semaphores of a user's module belong to the loop that first used
them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable
from typing import Any

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
        future = asyncio.run_coroutine_threadsafe(_outcome(awaitable), loop)
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


async def _outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
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
