"""One thread for numerical work, so that engine and training steps never run on the controller's loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from tidemill.core.errors import DeadlineError

T = TypeVar("T")
Call: TypeAlias = tuple[Future[Any], Callable[[], Any]]

QUIET_S = 0.005
"""Without a call for so long, what is left over may be used: whoever computes in a loop asks again sooner."""


class ComputeThread:
    """Implements `core.protocols.Compute` with one daemon thread: calls run one at a time in the order asked for.

    A cancelled call that has not started is skipped; one that runs is not interrupted (nothing can stop a matrix
    product half-way): it goes on to its end, its result is dropped, and the next call waits for it.
    """

    def __init__(self, name: str = "tidemill-compute") -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._put_off: deque[Call] = deque()  # until nothing else is to be computed
        self._ended: Future[None] = Future()
        self._closed = False
        self._name = name
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result, or the exception it raised.

        Raises:
            RuntimeError: the thread was closed.
        """
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        future: Future[T] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    @property
    def leftover(self) -> Leftover:
        """What is left of this thread when nobody else computes on it."""
        return Leftover(self)

    async def put_off(self, function: Callable[[], T]) -> T:
        """As `run`, once nothing else was asked for during `QUIET_S` seconds."""
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        future: Future[T] = Future()
        self._put_off.append((future, function))
        self._calls.put(_nothing())  # else the thread would go on waiting for an ordinary call
        return await asyncio.wrap_future(future)

    async def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after the calls already asked for.

        Raises:
            DeadlineError: they did not end in time; the thread dies with the process.
        """
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ended)), timeout_s)
        except TimeoutError as error:
            where = f"the call running on thread {self._name}"
            raise DeadlineError("computations to end", waited_s=timeout_s, look_at=where) from error
        self._thread.join(timeout_s)  # it has nothing left to do but return

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            _run(*call)
            del call  # an idle thread must not keep the last call's tensors alive
        for future, _ in self._put_off:
            future.cancel()
        self._ended.set_result(None)

    def _next(self) -> Call | None:
        try:
            return self._calls.get(timeout=QUIET_S if self._put_off else None)
        except queue.Empty:
            return self._put_off.popleft()


class Leftover:
    """Implements `core.protocols.Compute`: calls wait until a thread has nothing else to do. One that runs is not
    interrupted, so that what comes meanwhile waits for its end."""

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread

    async def run(self, function: Callable[[], T]) -> T:
        return await self._thread.put_off(function)


def _nothing() -> Call:
    future: Future[Any] = Future()
    future.cancel()
    return future, lambda: None


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # asyncio cannot carry it to the awaiting task
        future.set_exception(RuntimeError(f"the computation raised {error!r}"))
    except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the caller, and the thread must live on
        future.set_exception(error)
    else:
        future.set_result(result)
