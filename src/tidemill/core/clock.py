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
    """Await with a deadline.

    Raises:
        DeadlineError: naming `awaited` and `look_at` when `timeout_s` seconds pass first.
    """
    try:
        return await asyncio.wait_for(awaitable, timeout_s)
    except TimeoutError as error:
        raise DeadlineError(awaited, waited_s=timeout_s, look_at=look_at) from error
