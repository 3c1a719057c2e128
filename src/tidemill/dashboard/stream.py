"""Server-sent events: what changed in which run. Clients then ask for what they show.

The files are read once whatever the number of listeners. A slow client gets one message for all that it missed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from tidemill.core.errors import UserError
from tidemill.dashboard.runs import WatchedFolder, WatchedRun
from tidemill.gateway.errors import RATE, ApiError
from tidemill.telemetry.run_list import RunRow

FAST_S, SLOW_S = 0.25, 2.0
"""Time between two looks at a run with listeners, and at the list of runs."""
QUIET_S = 10.0
"""A client without news for so long gets a comment, which shows that the connection works."""
MOST_LISTENERS = 64
EVERYTHING = ("metrics", "events", "samples", "live", "summary", "manifest", "checks", "state")
SERVER = secrets.token_hex(4)
"""Part of the ids of events: another process has not counted the same changes."""


class Listener:
    """A client: at most one message waits for each run that it follows."""

    def __init__(self, run: WatchedRun | None) -> None:
        self.run = run  # None: all runs of the folder
        self._waiting = dict[str, dict[str, Any]]()
        self._news = asyncio.Event()

    def put(self, key: str, event: str, event_id: str = "", **data: Any) -> None:
        """Add a message, which takes the place of one that waits."""
        earlier = self._waiting.get(key, {}).get("data", {})
        if "changed" in data:
            data["changed"] = sorted({*data["changed"], *earlier.get("changed", ())})
        self._waiting[key] = {"event": event, "id": event_id, "data": data}
        self._news.set()

    async def messages(self, quiet_s: float = QUIET_S) -> AsyncIterator[bytes]:
        """The stream of the client, until its run is gone."""
        yield b"retry: 1000\n\n"
        while True:
            try:
                async with asyncio.timeout(quiet_s):
                    await self._news.wait()
            except TimeoutError:
                yield b": nothing new\n\n"
                continue
            self._news.clear()
            waiting, self._waiting = self._waiting, {}
            for message in waiting.values():
                identity = f"id: {message['id']}\n" if message["id"] else ""
                head = f"event: {message['event']}\n{identity}data: "
                yield head.encode() + msgspec.json.encode(message["data"]) + b"\n\n"
                if message["event"] in ("end", "gone"):
                    return


class Stream:
    """All listeners, and the task that looks for changes while there are any."""

    def __init__(self, folder: WatchedFolder) -> None:
        self._folder = folder
        self._listeners = set[Listener]()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self._rows = list[RunRow]()

    async def listen(self, run: WatchedRun | None, last_id: str) -> AsyncGenerator[bytes, None]:
        """The messages of a client.

        Args:
            run: None for all runs of the folder.
            last_id: of the last event that the client got; empty for a new one.

        Raises:
            ApiError: there are too many.
            FileNotFoundError: the run was deleted.
            UserError: it cannot be read.
        """
        if self._closed:
            raise ApiError(503, "the server stops", code="stopping")
        if len(self._listeners) >= MOST_LISTENERS:
            raise ApiError(503, f"{MOST_LISTENERS} pages are open already", kind=RATE, code="too_many_listeners")
        listener = Listener(run)
        if run is None:
            listener.put("", "changed", changed=["rows"])  # since the page was made
        else:
            await run.refresh()
            if not any(each.run is run for each in self._listeners):
                run.take_changes()  # nobody has waited for them
            if _event_id(run) != last_id:
                listener.put(run.key, "changed", _event_id(run), **run.news, changed=EVERYTHING)
        self._listeners.add(listener)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="looking for changes")
        return self._until_left(listener)

    async def _until_left(self, listener: Listener) -> AsyncGenerator[bytes, None]:
        try:
            async for message in listener.messages():
                yield message
        finally:
            self._listeners.discard(listener)

    async def close(self) -> None:
        """End all streams, and begin no other."""
        self._closed = True
        for listener in self._listeners:
            listener.put("", "end")
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        listed_s = -SLOW_S
        while self._listeners:
            await asyncio.gather(*(self._look_at(run) for run in {each.run for each in self._listeners} if run))
            if loop.time() - listed_s >= SLOW_S and any(each.run is None for each in self._listeners):
                listed_s = loop.time()
                with suppress(OSError):
                    await self._look_at_folder()
                    if not self._folder.complete:
                        listed_s = -SLOW_S  # look again at once
            await asyncio.sleep(FAST_S)

    async def _look_at(self, run: WatchedRun) -> None:
        """Send what is new in a run."""
        listeners = [each for each in self._listeners if each.run is run]
        try:
            await run.refresh()
        except (UserError, OSError):  # a file is being replaced, or the run deleted
            if not run.path.is_dir():
                for listener in listeners:
                    listener.put(run.key, "gone", run=run.key)
            return
        if changed := run.take_changes():
            for listener in listeners:
                listener.put(run.key, "changed", _event_id(run), **run.news, changed=changed)

    async def _look_at_folder(self) -> None:
        """Send that the table of runs has changed."""
        rows = await self._folder.rows()
        for listener in self._listeners if rows != self._rows else ():
            if listener.run is None:
                listener.put("", "changed", changed=["rows"])
        self._rows = rows


def _event_id(run: WatchedRun) -> str:
    return f"{run.news['cursor']}~{SERVER}{run.changes}"
