"""A worker: runs an engine in ticks, and reports once per tick."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from tidemill.core.errors import DeadlineError, WeightsError, WorkerLost
from tidemill.core.protocols import Clock, Compute, Engine, WeightSource
from tidemill.core.records import (
    GenerateRequest,
    GpuStatus,
    Loaded,
    LogprobBuffer,
    PolicyVersion,
    Pulled,
    SampleId,
    TokenBuffer,
    TokenDelta,
    WeightsSum,
    WorkerReport,
    WorkerStatus,
    count,
)

T = TypeVar("T")


SUM_SHARE = 0.005
"""Greatest share of a worker's time in which it sums its weights."""


class WeightsCheck(Protocol):
    """Finds changes of the weights in memory."""

    @property
    def expected(self) -> tuple[int, ...]:
        """Sums of the parts of the version in use, as it was published; empty if they cannot be compared."""

    def part_sum(self, number: int) -> int:
        """Sum of one part as it is in memory."""


class EngineWorker:
    """Implements `core.protocols.Worker`.

    A background task polls the engine for `tick_s` seconds per report while it has samples, and sleeps otherwise. All
    engine calls run on `compute` and do not overlap. If the engine raises, earlier reports are still delivered, and
    every later call raises the same error.

    Args:
        source: `load` pulls from it; None if the engine reads the trainer's parameters.
        heartbeat_s: an idle worker sends an empty report after this time. There is no heartbeat during an engine call,
            so that the controller notices an engine that hangs.
        timer: measures the seconds of a swap, on the thread of engine calls.
        check: sums a part of the weights per report, at most `SUM_SHARE` of the time; None: the engine shares them.
        gpu: status of the GPU since the last call, None if there is nothing new; must not wait.
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
        check: WeightsCheck | None = None,
        gpu: Callable[[], GpuStatus | None] = lambda: None,
    ) -> None:
        self._engine, self._compute, self._clock, self._source = engine, compute, clock, source
        self._tick_s, self._heartbeat_s, self._close_timeout_s = tick_s, heartbeat_s, close_timeout_s
        self._worker_id, self._lease_id, self._timer = worker_id, lease_id, timer
        self._check_weights, self._gpu = check, gpu
        self._sum: WeightsSum | None = None  # for the next report
        self._next_part, self._next_sum_s = 0, 0.0
        self._sum_s, self._swapped_s = math.inf, 0.0  # duration of the last sum; time of the last swap
        self._status = engine.status()  # after the last engine call
        self._reports: deque[WorkerReport] = deque()
        self._reports_made = 0
        self._notice_s: float | None = None
        self._report_ready = asyncio.Event()  # also set by an error or the end
        self._has_samples = asyncio.Event()
        self._loading = asyncio.Lock()
        self._call_lock = threading.Lock()  # guards the next two
        self._in_call = self._ended = False  # an engine call is running; no other may start
        self._half_swapped: Exception | None = None  # ended a swap, after which no token may be generated
        self._error: Exception | None = None
        self._killed = self._closing = False
        self._serving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # cancelled by `kill` and `close`

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._start()
        await self._on_engine(lambda: self._engine.submit(requests))
        self._has_samples.set()

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        started = self._clock.now()
        deltas = await self._on_engine(lambda: self._engine.abort(sample_ids))
        if deltas:
            self._report(deltas, self._clock.now() - started)

    async def load(self, version: PolicyVersion) -> Loaded:
        """Pull and verify weights during generation, then swap them between two tokens and compute the probe.

        Raises:
            WeightsError: the version cannot be pulled; the engine keeps its current version.
        """
        self._start()
        source = self._source
        async with self._loading:
            if source is None:
                return await self._on_engine(lambda: self._swap(version, None))
            pulled = await self._until_killed(lambda: source.prepare(version))
            return await self._on_engine(lambda: self._swap(version, pulled))

    def _swap(self, version: PolicyVersion, pulled: Pulled | None) -> Loaded:
        started, logprobs = self._timer(), self._engine.capabilities.logprobs
        if self._source is None or pulled is None:
            self._engine.load(version)
            return Loaded(version=version, swap_s=self._timer() - started, rollout_logprobs=logprobs)
        last_sums = self._all_sums(started - self._swapped_s)
        try:
            self._source.swap(pulled)
            self._engine.load(version)
        except WeightsError:
            raise  # nothing has changed
        except Exception as error:  # ranks of the engine may have different versions
            self._half_swapped = error
            raise
        self._swapped_s = self._timer()
        probe_ids = pulled.manifest.probe_ids
        probe_logprobs = self._engine.probe(probe_ids) if probe_ids else b""
        return Loaded(
            version=version,
            nbytes=pulled.nbytes,
            full=pulled.full,
            pull_s=pulled.pull_s,
            swap_s=self._timer() - started,
            retries=pulled.retries,
            probe_logprobs=probe_logprobs,
            rollout_logprobs=logprobs,
            part_sums=self._check_weights.expected if self._check_weights is not None else (),
            last_sums=last_sums,
        )

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return await self._on_engine(lambda: self._engine.probe(token_ids))

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        if not self._reports:
            self._start()
            self._report_ready.clear()
            try:
                async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 can lose a cancellation
                    await self._report_ready.wait()
            except TimeoutError:
                return None
        if self._reports:
            return self._reports.popleft()
        self._check()
        return None

    def notice(self, seconds: float) -> None:
        """Report at once that the machine will be evicted in `seconds`."""
        self._notice_s = seconds
        if self._error is None and not self._killed and not self._closing:
            self._report((), 0.0)

    async def close(self) -> None:
        """Stop after the current tick.

        Raises:
            DeadlineError: the tick did not end in time.
        """
        self._closing = True
        self._has_samples.set()
        self._report_ready.set()
        try:
            if self._serving is None:
                return
            done, _ = await asyncio.wait({self._serving}, timeout=self._close_timeout_s)
            if not done:
                where = f"the engine of worker {self._worker_id}, which has not returned from poll"
                raise DeadlineError("the worker to stop", waited_s=self._close_timeout_s, look_at=where)
        finally:
            self._end()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """Stop immediately: discards pending reports; callers that wait get WorkerLost.

        A running engine call completes, and its result is discarded.
        """
        self._killed = True
        self._reports.clear()
        self._report_ready.set()
        self._end()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        with self._call_lock:
            self._ended = True
            if not self._in_call:  # a running call still needs the weights
                self._release_weights()

    def _release_weights(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _check(self) -> None:
        if self._killed:  # a new error each time: the traceback of a stored one would keep the weights in memory
            raise WorkerLost(f"worker {self._worker_id} was killed")
        if self._error is not None:
            raise self._error
        if self._closing:
            raise RuntimeError(f"worker {self._worker_id} is closed")

    def _start(self) -> None:
        self._check()
        if self._serving is None:
            self._serving = self._task(self._run_ticks())
            self._task(self._send_heartbeats())

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
            with self._call_lock:
                if self._ended:
                    raise WorkerLost(f"worker {self._worker_id} is closed")
                if self._half_swapped is not None:
                    raise WorkerLost(f"worker {self._worker_id} did not load a version: {self._half_swapped!r}")
                self._in_call = True
            try:
                result = call()
                self._status = self._engine.status()
                return result
            finally:
                self._leave_call()

        return await self._until_killed(lambda: self._compute.run(run))

    def _leave_call(self) -> None:
        with self._call_lock:
            self._in_call = False
            if self._ended:
                self._release_weights()

    async def _run_ticks(self) -> None:
        try:
            while not self._closing:
                await self._has_samples.wait()
                if not self._closing:
                    await self._tick()
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._error = error
            self._report_ready.set()

    def _sum_part(self) -> None:
        """Sum the next part of the weights if the share of time allows it. Between two tokens only."""
        check, now_s = self._check_weights, self._timer()
        if check is None or now_s < self._next_sum_s or not (parts := len(check.expected)):
            return
        part = self._next_part % parts
        self._sum = WeightsSum(version=self._engine.status().version.number, part=part, total=check.part_sum(part))
        self._next_part = part + 1
        self._sum_s = self._timer() - now_s
        self._next_sum_s = now_s + self._sum_s / SUM_SHARE

    def _all_sums(self, used_s: float) -> tuple[int, ...]:
        """Sums of a version that was used for `used_s`, so that all of its tokens are known to be right; empty if this
        would take too long."""
        check = self._check_weights
        parts = range(len(check.expected)) if check is not None else ()
        if check is None or len(parts) * self._sum_s > SUM_SHARE * used_s:
            return ()
        return tuple(check.part_sum(part) for part in parts)

    def _poll(self) -> list[TokenDelta]:
        deltas = self._engine.poll(self._tick_s)
        self._sum_part()
        return deltas

    async def _tick(self) -> None:
        started = self._clock.now()
        deltas = await self._on_engine(self._poll)
        if self._status.running + self._status.queued == 0:  # includes samples submitted after this poll
            self._has_samples.clear()
        self._report(deltas, self._clock.now() - started)
        if not deltas and self._has_samples.is_set():
            await asyncio.sleep(self._tick_s)  # all queued samples wait for a later version

    async def _send_heartbeats(self) -> None:
        while self._error is None:
            before = self._reports_made
            await asyncio.sleep(self._heartbeat_s)
            if self._reports_made == before and not self._reports and not self._in_call:
                if self._check_weights is not None:
                    try:
                        await self._on_engine(self._sum_part)
                    except Exception as error:  # noqa: BLE001 - raised by the next call
                        self._error = error
                        self._report_ready.set()
                        return
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
                    engine=self._engine.capabilities.name,
                    weights=self._sum,
                    gpu=self._gpu(),
                ),
                notice_s=self._notice_s,
            )
        )
        self._notice_s = self._sum = None
        self._reports_made += 1
        self._report_ready.set()
