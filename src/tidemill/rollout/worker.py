"""The worker around an in-process engine: requests in, one report per tick out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from tidemill.core.buffers import count
from tidemill.core.clock import Clock
from tidemill.core.errors import DeadlineError
from tidemill.core.protocols import Compute, Engine, EngineStatus
from tidemill.core.records import GenerateRequest, PolicyVersion, SampleId, TokenDelta, WorkerReport, WorkerStatus


class EngineWorker:
    """Implements `core.protocols.Worker`.

    A background task polls the engine for `tick_s` seconds at a time while it has samples, one report each, and sleeps
    while it has none. Every engine call goes through `compute`, so they never overlap. When the engine raises, the
    reports made before it are delivered, and then every call raises what it raised.
    """

    def __init__(
        self,
        engine: Engine,
        compute: Compute,
        *,
        clock: Clock,
        tick_s: float,
        worker_id: str = "local",
        lease_id: str = "local",
        close_timeout_s: float = 30.0,
    ) -> None:
        self._engine, self._compute, self._clock = engine, compute, clock
        self._tick_s, self._close_timeout_s = tick_s, close_timeout_s
        self._worker_id, self._lease_id = worker_id, lease_id
        self._reports: deque[WorkerReport] = deque()
        self._news = asyncio.Event()  # a report, a failure, or the end
        self._work = asyncio.Event()  # the engine has samples
        self._submissions = 0
        self._failure: BaseException | None = None
        self._closing = False
        self._serving: asyncio.Task[None] | None = None

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._check()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name=f"worker {self._worker_id}")
        await self._compute.run(lambda: self._engine.submit(requests))
        self._submissions += 1
        self._work.set()

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        """Stop generating samples; their last tokens and the finish "aborted" come with the next report."""
        self._check()
        began = self._clock.now()
        deltas, status = await self._compute.run(lambda: (self._engine.abort(sample_ids), self._engine.status()))
        if deltas:
            self._report(deltas, status, self._clock.now() - began)

    async def load(self, version: PolicyVersion) -> None:
        self._check()
        await self._compute.run(lambda: self._engine.load(version))

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        if not self._reports and self._failure is None:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return None
        if self._reports:
            return self._reports.popleft()
        self._check()
        return None

    async def close(self) -> None:
        """Stop after the tick that is running.

        Raises:
            DeadlineError: the engine did not come back from it in time.
        """
        self._closing = True
        self._work.set()
        self._news.set()
        if self._serving is None:
            return
        done, _ = await asyncio.wait({self._serving}, timeout=self._close_timeout_s)
        if not done:
            self._serving.cancel()
            where = f"the engine of worker {self._worker_id}, which is still in its poll"
            raise DeadlineError("the worker to stop", waited_s=self._close_timeout_s, look_at=where)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise RuntimeError(f"worker {self._worker_id} is closed")

    async def _serve(self) -> None:
        try:
            while not self._closing:
                await self._work.wait()
                if not self._closing:
                    await self._tick()
        except Exception as error:  # noqa: BLE001 - belongs to whoever waits for a report
            self._failure = error
            self._news.set()

    async def _tick(self) -> None:
        submissions, began = self._submissions, self._clock.now()
        deltas, status = await self._compute.run(lambda: (self._engine.poll(self._tick_s), self._engine.status()))
        # Samples submitted behind this poll are not in its status: only an unchanged count means idle.
        if status.running + status.queued == 0 and submissions == self._submissions:
            self._work.clear()
        self._report(deltas, status, self._clock.now() - began)
        if not deltas and self._work.is_set():
            await asyncio.sleep(self._tick_s)  # all that is queued waits for a later version

    def _report(self, deltas: Sequence[TokenDelta], status: EngineStatus, elapsed_s: float) -> None:
        tokens = sum(count(delta.token_ids) for delta in deltas)
        self._reports.append(
            WorkerReport(
                lease_id=self._lease_id,
                deltas=tuple(deltas),
                status=WorkerStatus(
                    worker_id=self._worker_id,
                    version=status.version.number,
                    running=status.running,
                    queued=status.queued,
                    free_slots=status.free_slots,
                    prompt_tokens_computed=status.prompt_tokens_computed,
                    prompt_tokens_reused=status.prompt_tokens_reused,
                    tokens_per_s=tokens / elapsed_s if elapsed_s > 0 else 0.0,
                ),
            )
        )
        self._news.set()
