"""Time as asyncio tells it, so that a virtual event loop can stand in for the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from tidemill.core.errors import DeadlineError

T = TypeVar("T")


class Clock(Protocol):
    """Seconds since an arbitrary origin, never going back."""

    def now(self) -> float: ...


class LoopClock:
    """The running event loop's own clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


async def within(awaitable: Awaitable[T], *, timeout_s: float, awaited: str, look_at: str) -> T:
    """Await with a deadline. (Not by `asyncio.wait_for`: Python 3.11's loses a cancellation that meets the result.)

    Raises:
        DeadlineError: naming `awaited` and `look_at` when `timeout_s` seconds pass first.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineError(awaited, waited_s=timeout_s, look_at=look_at) from error
