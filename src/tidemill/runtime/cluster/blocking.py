"""Ray's blocking calls, off the loop and with a deadline; one that never returns does not keep the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tidemill.core.clock import within

T = TypeVar("T")


async def blocking(function: Callable[[], T], *, awaited: str, timeout_s: float) -> T:
    """Call `function` in a daemon thread of its own.

    Raises:
        DeadlineError: it did not return in time; its thread is left to itself.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=call, name=awaited, daemon=True).start()
    waiting = asyncio.shield(asyncio.wrap_future(future))
    return await within(waiting, timeout_s=timeout_s, awaited=awaited, look_at="the load of this machine")
