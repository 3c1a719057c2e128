"""A worker in another process, as the controller sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from ray.exceptions import RayError

from tidemill.core.records import GenerateRequest, Loaded, PolicyVersion, SampleId, WorkerReport
from tidemill.runtime.cluster.remote import Remote
from tidemill.runtime.cluster.wire import encode, read_answer

CALL_S = 60.0
LOAD_S = 600.0
CLOSE_S = 30.0
POLL_S = 5.0
"""How long the actor holds a poll open when it has nothing to say."""


class RayWorker:
    """Implements `core.protocols.Worker` over an actor that is a `Serving`.

    One poll is always under way, whoever waits for it and for how long: nothing that the worker reported is lost when
    a wait ends early, and a worker that is silent is asked once.

    Args:
        owned: the actor is this worker's alone and ends with it; otherwise it serves others too and stays.
    """

    def __init__(self, remote: Remote, *, owned: bool) -> None:
        self._remote, self._owned = remote, owned
        self._reports: deque[WorkerReport] = deque()
        self._poll: asyncio.Future[bytes] | None = None

    @property
    def actor_id(self) -> str:
        """By which Ray knows it."""
        name: str = self._remote.handle._actor_id.hex()
        return name

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await self._remote.call("submit", encode(requests), kind=type(None), timeout_s=CALL_S)

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await self._remote.call("abort", encode(sample_ids), kind=type(None), timeout_s=CALL_S)

    async def load(self, version: PolicyVersion) -> Loaded:
        return await self._remote.call("load", encode(version), kind=Loaded, timeout_s=LOAD_S)

    async def notice(self, seconds: float) -> None:
        """Its machine goes in so many seconds: its next report says so."""
        await self._remote.call("notice", seconds, kind=type(None), timeout_s=CALL_S)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        if not self._reports:
            if self._poll is None:
                self._poll = self._remote.ask("next_reports", POLL_S)
            done, _ = await asyncio.wait({self._poll}, timeout=timeout_s)
            if not done:
                return None
            poll, self._poll = self._poll, None
            try:
                self._reports.extend(read_answer(poll.result(), list[WorkerReport]))
            except RayError as error:
                raise self._remote.end(error) from error
        return self._reports.popleft() if self._reports else None

    async def close(self) -> None:
        try:
            await self._remote.call("close", kind=type(None), timeout_s=CLOSE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        if self._owned:
            self._remote.kill()
