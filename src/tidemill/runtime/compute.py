"""One thread for numerical work, so that engine and training steps never run on the controller's loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tidemill.core.errors import DeadlineError

T = TypeVar("T")


class ComputeThread:
    """Implements `core.protocols.Compute` with one daemon thread: calls run one at a time in the order asked for.

    A cancelled call that has not started is skipped; one that runs is not interrupted (nothing can stop a matrix
    product half-way): it goes on to its end, its result is dropped, and the next call waits for it.
    """

    def __init__(self, name: str = "tidemill-compute") -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._ended: Future[None] = Future()
        self._closed = False
        self._name = name
        threading.Thread(target=self._serve, name=name, daemon=True).start()

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

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            _run(*call)
            del call  # an idle thread must not keep the last call's tensors alive
        self._ended.set_result(None)


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
