"""The actor's side of a worker: requests and reports as msgpack, an `EngineWorker` behind them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from tidemill.core.errors import TidemillError
from tidemill.core.records import GenerateRequest, Loaded, PolicyVersion, SampleId, WorkerReport
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.cluster.wire import answering, decode

P = ParamSpec("P")
S = TypeVar("S", bound="Asked")

AT_ONCE = 64
"""Reports in one answer, at most."""


def asked(
    method: Callable[Concatenate[S, P], Awaitable[object]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, bytes]]:
    """A method that other processes call: it returns an encoded `Answer`, and is a sign of life of whoever calls."""
    answer = answering(method)

    @functools.wraps(method)
    async def call(self: S, *args: P.args, **kwargs: P.kwargs) -> bytes:
        self.under_way += 1
        try:
            return await answer(self, *args, **kwargs)
        finally:
            self.under_way -= 1
            self.asked_s = time.monotonic()

    return call  # type: ignore[return-value]  # wraps keeps the first argument's name, which no caller uses


class Asked:
    """Base of the actors whose methods are coroutines."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = 0  # calls
        self.asked_s = time.monotonic()  # when the last call ended

    @property
    def forgotten_s(self) -> float:
        """How long nobody has asked for anything."""
        return 0.0 if self.under_way else time.monotonic() - self.asked_s


class Serving(Asked):
    """Base of the actors that generate."""

    def __init__(self) -> None:
        super().__init__()
        self.worker: EngineWorker | None = None
        self.tasks: set[asyncio.Task[Any]] = set()

    def served(self) -> EngineWorker:
        if self.worker is None:
            raise TidemillError("this actor has not been started")
        return self.worker

    @asked
    async def submit(self, requests: bytes) -> None:
        await self.served().submit(decode(requests, list[GenerateRequest]))

    @asked
    async def abort(self, sample_ids: bytes) -> None:
        await self.served().abort(decode(sample_ids, list[SampleId]))

    @asked
    async def load(self, version: bytes) -> Loaded:
        return await self.served().load(decode(version, PolicyVersion))

    @asked
    async def notice(self, seconds: float) -> None:
        self.served().notice(seconds)

    @asked
    async def next_reports(self, timeout_s: float) -> list[WorkerReport]:
        """Everything there is to say, after waiting for the first of it.

        Raises:
            Exception: what the engine raised, once its last reports are delivered.
        """
        first = await self.served().next_report(timeout_s)
        reports = [] if first is None else [first]
        with suppress(Exception):  # raised again by the next call
            while reports and len(reports) < AT_ONCE and (more := await self.served().next_report(0.0)) is not None:
                reports.append(more)
        return reports

    @asked
    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()
