"""The worker around an in-process engine: requests in, one report per tick out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tidemill.core.errors import DeadlineError, WorkerLost
from tidemill.core.protocols import Clock, Compute, Engine, WeightSource
from tidemill.core.records import (
    GenerateRequest,
    Loaded,
    PolicyVersion,
    Pulled,
    SampleId,
    TokenDelta,
    WorkerReport,
    WorkerStatus,
    count,
)

T = TypeVar("T")


class EngineWorker:
    """Implements `core.protocols.Worker`.

    A background task polls the engine for `tick_s` seconds at a time while it has samples, one report each, and sleeps
    while it has none. Every engine call goes through `compute`, so they never overlap. When the engine raises, the
    reports made before it are delivered, and then every call raises what it raised.

    Args:
        source: where `load` pulls from; None where the engine reads the trainer's own parameters.
        heartbeat_s: a worker that has said nothing for so long sends an empty report. It does not while the engine is
            inside a call: an engine that does not come back is silence.
        timer: the seconds of a swap; called where engine calls run.
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
        source: WeightSource | None = None,
        heartbeat_s: float = 1.0,
        close_timeout_s: float = 30.0,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._compute, self._clock, self._source = engine, compute, clock, source
        self._tick_s, self._heartbeat_s, self._close_timeout_s = tick_s, heartbeat_s, close_timeout_s
        self._worker_id, self._lease_id, self._timer = worker_id, lease_id, timer
        self._status = engine.status()  # after the last call
        self._reports: deque[WorkerReport] = deque()
        self._reported = 0
        self._notice_s: float | None = None
        self._news = asyncio.Event()  # a report, a failure, or the end
        self._work = asyncio.Event()  # the engine has samples
        self._loading = asyncio.Lock()
        self._entering = threading.Lock()
        self._inside = self._ended = False  # the engine is in a call; it may not enter another
        self._failure: Exception | None = None
        self._killed = self._closing = False
        self._serving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # what a kill cancels

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._start()
        await self._on_engine(lambda: self._engine.submit(requests))
        self._work.set()

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        """Stop generating samples; their last tokens and the finish "aborted" come with the next report."""
        began = self._clock.now()
        deltas = await self._on_engine(lambda: self._engine.abort(sample_ids))
        if deltas:
            self._report(deltas, self._clock.now() - began)

    async def load(self, version: PolicyVersion) -> Loaded:
        """Pull and verify while generation goes on; then swap, and compute the probe, between two tokens.

        Raises:
            WeightsError: the version cannot be had whole; the engine goes on with the one it has.
        """
        self._start()
        source = self._source
        async with self._loading:
            if source is None:
                return await self._on_engine(lambda: self._swap(version, None))
            pulled = await self._until_killed(lambda: source.prepare(version))
            return await self._on_engine(lambda: self._swap(version, pulled))

    def _swap(self, version: PolicyVersion, pulled: Pulled | None) -> Loaded:
        began, told = self._timer(), self._engine.capabilities.logprobs
        if self._source is None or pulled is None:
            self._engine.load(version)
            return Loaded(version=version, swap_s=self._timer() - began, rollout_logprobs=told)
        self._source.swap(pulled)
        self._engine.load(version)
        probe_ids = pulled.manifest.probe_ids
        probe_logprobs = self._engine.probe(probe_ids) if probe_ids else b""
        return Loaded(
            version=version,
            nbytes=pulled.nbytes,
            full=pulled.full,
            pull_s=pulled.pull_s,
            swap_s=self._timer() - began,
            retries=pulled.retries,
            probe_logprobs=probe_logprobs,
            rollout_logprobs=told,
        )

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        if not self._reports:
            self._start()
            self._news.clear()
            try:
                async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 can lose a cancellation
                    await self._news.wait()
            except TimeoutError:
                return None
        if self._reports:
            return self._reports.popleft()
        self._check()
        return None

    def notice(self, seconds: float) -> None:
        """The machine goes in so many seconds: the next report, due at once, says so."""
        self._notice_s = seconds
        if self._failure is None and not self._killed and not self._closing:
            self._report((), 0.0)

    async def close(self) -> None:
        """Stop after the tick that is running.

        Raises:
            DeadlineError: the engine did not come back from it in time.
        """
        self._closing = True
        self._work.set()
        self._news.set()
        try:
            if self._serving is None:
                return
            done, _ = await asyncio.wait({self._serving}, timeout=self._close_timeout_s)
            if not done:
                where = f"the engine of worker {self._worker_id}, which is still in its poll"
                raise DeadlineError("the worker to stop", waited_s=self._close_timeout_s, look_at=where)
        finally:
            self._end()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """End it now: what was not taken with `next_report` is lost, whoever waits gets WorkerLost.

        A call that the engine is in runs to its end on its compute; nobody sees its result.
        """
        self._killed = True
        self._reports.clear()
        self._news.set()
        self._end()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        with self._entering:
            self._ended = True
            if not self._inside:
                self._release()

    def _release(self) -> None:
        """Give the weights back, which a call that the engine is in needs to its end."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _check(self) -> None:
        if self._killed:  # a new one each time: kept, its traceback would keep the engine and its weights in memory
            raise WorkerLost(f"worker {self._worker_id} was killed")
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise RuntimeError(f"worker {self._worker_id} is closed")

    def _start(self) -> None:
        self._check()
        if self._serving is None:
            self._serving = self._task(self._serve())
            self._task(self._beat())

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=f"worker {self._worker_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _until_killed(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check()
        task = self._task(call())
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._killed and not (caller and caller.cancelling()):
                self._check()
            raise

    async def _on_engine(self, call: Callable[[], T]) -> T:
        def run() -> T:
            self._enter()
            try:
                result = call()
                self._status = self._engine.status()
                return result
            finally:
                self._leave()

        return await self._until_killed(lambda: self._compute.run(run))

    def _enter(self) -> None:
        with self._entering:
            if self._ended:
                raise WorkerLost(f"worker {self._worker_id} is closed")
            self._inside = True

    def _leave(self) -> None:
        with self._entering:
            self._inside = False
            if self._ended:
                self._release()

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
        began = self._clock.now()
        deltas = await self._on_engine(lambda: self._engine.poll(self._tick_s))
        if self._status.running + self._status.queued == 0:  # also of samples submitted behind this poll
            self._work.clear()
        self._report(deltas, self._clock.now() - began)
        if not deltas and self._work.is_set():
            await asyncio.sleep(self._tick_s)  # all that is queued waits for a later version

    async def _beat(self) -> None:
        while self._failure is None:
            before = self._reported
            await asyncio.sleep(self._heartbeat_s)
            if self._reported == before and not self._reports and not self._inside:
                self._report((), 0.0)

    def _report(self, deltas: Sequence[TokenDelta], elapsed_s: float) -> None:
        tokens, status = sum(count(delta.token_ids) for delta in deltas), self._status
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
                    tokens_per_s=tokens / elapsed_s if elapsed_s > 0 else 0.0,
                    prompt_tokens_computed=status.prompt_tokens_computed,
                    prompt_tokens_reused=status.prompt_tokens_reused,
                    tokens_generated=status.tokens_generated,
                    work=status.work,
                ),
                notice_s=self._notice_s,
            )
        )
        self._notice_s = None
        self._reported += 1
        self._news.set()
