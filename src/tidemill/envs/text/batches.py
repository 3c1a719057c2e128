"""Rewards that judge several samples at once: whatever has queued up while one batch is judged is the next batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from tidemill.envs.text.sample import Sample


class Judge(Protocol):
    """Scores samples together."""

    async def judge(self, samples: Sequence[Sample]) -> Sequence[float | Exception]:
        """One score or fault a sample, in order; an exception raised is the fault of all of them."""

    async def close(self) -> None: ...


class Batches:
    """One sample's score at a time for whoever asks, batches for the judge. Each sample is scored as soon as the judge
    is free: nothing waits for a batch to fill.

    Args:
        most: samples of one batch, at most.
        overtake_s: a batch that takes longer no longer holds up the next, which is judged beside it; None holds it up
            for as long as it takes.
    """

    def __init__(self, judge: Judge, *, most: int, overtake_s: float | None = None) -> None:
        self._judge, self._most, self._overtake_s = judge, most, overtake_s
        self._waiting: deque[tuple[Sample, asyncio.Future[float]]] = deque()
        self._answering: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, sample: Sample) -> float:
        """The sample's score, or the exception that is its fault."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, future))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def close(self) -> None:
        """Give up what is being judged, and what waits."""
        under_way = {*self._answering, *([self._serving] if self._serving else ())}
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        _fail(self._waiting)
        self._waiting.clear()
        await self._judge.close()

    async def _serve(self) -> None:
        try:
            await asyncio.sleep(0)  # samples that finished in the same moment come along
            while batch := self._next_batch():
                answering = asyncio.create_task(self._answer(batch))
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
                await asyncio.wait({answering}, timeout=self._overtake_s)
        finally:
            self._serving = None

    def _next_batch(self) -> list[tuple[Sample, asyncio.Future[float]]]:
        batch: list[tuple[Sample, asyncio.Future[float]]] = []
        while self._waiting and len(batch) < self._most:
            entry = self._waiting.popleft()
            if not entry[1].done():  # nobody waits any more for one past its deadline
                batch.append(entry)
        return batch

    async def _answer(self, batch: list[tuple[Sample, asyncio.Future[float]]]) -> None:
        results: Sequence[float | Exception]
        try:
            results = await self._judge.judge([sample for sample, _ in batch])
            if len(results) != len(batch):
                raise ValueError(f"{len(results)} scores for {len(batch)} samples")
        except asyncio.CancelledError:
            _fail(batch)
            raise
        except Exception as error:  # noqa: BLE001 -- the fault of these samples, not of the run
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def _fail(entries: Iterable[tuple[Sample, asyncio.Future[float]]]) -> None:
    for _, future in entries:
        if not future.done():
            future.set_exception(RuntimeError("closed before there was a score"))
