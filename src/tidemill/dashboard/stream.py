"""Server-sent events: what changed in which run. Clients then ask for what they show.

A run is read once whatever the number of its listeners. A slow client gets one message for all that it missed, and one
that comes back a message that names everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec

from tidemill.core.errors import UserError
from tidemill.dashboard.runs import Watched, WatchedRun
from tidemill.gateway.errors import RATE, ApiError

POLL_S = 0.25
"""Time between two looks of a listener."""
QUIET_S = 10.0
"""A client without news for so long gets a comment, which shows that the connection works."""
MOST_LISTENERS = 64


class Stream:
    """All listeners."""

    def __init__(self) -> None:
        self._listeners = 0
        self._closed = asyncio.Event()

    async def listen(self, watched: Watched) -> AsyncGenerator[bytes, None]:
        """The messages of a client.

        Raises:
            ApiError: there are too many.
            FileNotFoundError: the run was deleted.
            UserError: it cannot be read.
        """
        if self._closed.is_set():
            raise ApiError(503, "the server stops", code="stopping")
        if self._listeners >= MOST_LISTENERS:
            raise ApiError(503, f"{MOST_LISTENERS} pages are open already", kind=RATE, code="too_many_listeners")
        await watched.look()
        return self._messages(watched)

    async def _messages(self, watched: Watched) -> AsyncGenerator[bytes, None]:
        """The stream of a client, until its run is gone."""
        self._listeners += 1
        seen, quiet_s = 0, 0.0
        try:
            yield b"retry: 1000\n\n"
            while not self._closed.is_set():
                try:
                    await watched.look()
                except (UserError, OSError):  # a file is being replaced, or the run deleted
                    if isinstance(watched, WatchedRun) and not watched.path.is_dir():
                        yield b"event: gone\ndata: {}\n\n"
                        return
                quiet_s += POLL_S
                if watched.changes > seen:
                    data = {**watched.news, "changed": watched.changed_after(seen)}
                    seen, quiet_s = watched.changes, 0.0
                    yield b"event: changed\ndata: " + msgspec.json.encode(data) + b"\n\n"
                elif quiet_s >= QUIET_S:
                    quiet_s = 0.0
                    yield b": nothing new\n\n"
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._closed.wait()
            yield b"event: end\ndata: {}\n\n"
        finally:
            self._listeners -= 1

    def close(self) -> None:
        """End all streams, and begin no other."""
        self._closed.set()
