"""Ray's blocking calls, off the loop and with a deadline; one that never returns does not keep the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from tidemill.core.clock import within

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
