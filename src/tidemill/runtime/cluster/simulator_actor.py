"""The actor of a simulator on Ray. Apart from the handle's module, because it imports no torch."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import ray

from tidemill.core.chunks import ChunkJob, ChunkReport, NewWeights
from tidemill.robots.program import Beginning, SimulatorLoop
from tidemill.runtime.cluster.ray_internals import SIGTERM_GRACE_S, signal_fd
from tidemill.runtime.cluster.wire import AsyncActor, served

ORPHAN_S = 60.0
"""An actor without any call for this long ends itself."""


class SimulatorActor(AsyncActor):
    """Computes chunks in a thread, one after another, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1)
        self._reports: asyncio.Queue[ChunkReport] = asyncio.Queue()
        self._notice_s: float | None = None

    @served
    async def place(self) -> str:
        """Id of the node it was placed on; the first call to a new actor."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    @served
    async def start(self, beginning: Beginning) -> None:
        self._loop, self._heartbeat_s = SimulatorLoop(beginning), beginning.heartbeat_s
        asyncio.get_running_loop().add_reader(signal_fd(), self._on_sigterm)
        self._orphan = asyncio.create_task(self.exit_when_orphaned(ORPHAN_S))

    @served
    async def take_weights(self, weights: NewWeights) -> None:
        self._thread.submit(self._loop.load, weights)

    @served
    async def submit(self, job: ChunkJob) -> None:
        running = asyncio.get_running_loop()
        self._loop.unfinished += 1

        def compute() -> None:
            report = self._loop.compute(job)
            self._loop.unfinished -= 1
            running.call_soon_threadsafe(self._reports.put_nowait, report)

        self._thread.submit(compute)

    @served
    async def notice(self, seconds: float) -> None:
        self._notice_s = seconds

    @served
    async def next_reports(self, timeout_s: float) -> list[ChunkReport]:
        """One report: of a job, or a heartbeat."""
        try:
            async with asyncio.timeout(min(timeout_s, self._heartbeat_s)):
                report = await self._reports.get()
        except TimeoutError:
            report = self._loop.report()
        return [msgspec.structs.replace(report, notice_s=self._notice_s)]

    def _on_sigterm(self) -> None:
        os.read(signal_fd(), 64)
        self._notice_s = SIGTERM_GRACE_S
