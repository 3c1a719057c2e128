"""From an open batch to its scored samples, one by one as they finish.

```
 batch ──requests──▶ worker ──reports──┐
   ▲                                   ▼
   │                               ( mailbox ) ◀──rewards── scorer ◀──┐
   │                                   │                              │
   └──── ledger: apply, journal ◀──────┴───▶ finished samples ────────┘
                                       └───▶ scored samples ──▶ whoever iterates
```
One task owns the batch and reads the mailbox; receiving and scoring only put letters into it. The consumer may take its
time (the trainer does): generating, journalling and scoring go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tidemill.controller.assembly import scored
from tidemill.controller.batch import Batch
from tidemill.controller.rollout import Rollout, StopRequested
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.waiting import Wait, still_waiting
from tidemill.core.buffers import unpack_tokens
from tidemill.core.errors import TidemillError
from tidemill.core.records import Reward, Trajectory, WorkerReport

MAX_FAILURES = 3
"""Attempts at one sample that may end in an engine error before the run does."""

RECEIVE_S = 10.0
"""How long one `next_report` waits; only a rhythm, the deadline is `Patience.worker_s`."""


@asynccontextmanager
async def collecting(batch: Batch, rollout: Rollout) -> AsyncIterator[Collection]:
    """Generate and score a batch: yields its scored samples in the order they come.

    The iteration raises:
        StopRequested: `rollout.stop` was set; the samples in flight were called back and what they had is journalled.
        DeadlineError: nothing came from the worker or the scorer for too long.
        TidemillError: the engine failed again and again on one sample.
        Exception: whatever the worker, the scorer or the journal raised.
    """
    collection = Collection(batch, rollout)
    tasks = [asyncio.create_task(job) for job in (collection.run(), collection.receive(), collection.watch_stop())]
    try:
        yield collection
    finally:
        for task in (*tasks, *collection.scoring):
            task.cancel()
        await asyncio.gather(*tasks, *collection.scoring, return_exceptions=True)


@dataclass(slots=True)
class _Mail:
    """What the mailbox held, by kind."""

    reports: list[WorkerReport] = field(default_factory=list)
    rewards: list[tuple[Sample, Reward]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    stop: bool = False

    def __bool__(self) -> bool:
        return bool(self.reports or self.rewards or self.failures or self.stop)

    @property
    def news(self) -> bool:
        """Whether anything but heartbeats came."""
        return bool(self.rewards or self.failures or self.stop or any(report.deltas for report in self.reports))


class Collection:
    """The state of one `collecting`; iterate over it for the scored samples."""

    def __init__(self, batch: Batch, rollout: Rollout) -> None:
        self._batch, self._rollout = batch, rollout
        self._mail = _Mail()
        self._arrived = asyncio.Event()
        self._scored: asyncio.Queue[Trajectory | Exception] = asyncio.Queue()
        self._began = self._news_at = self._noticed_at = rollout.clock.now()
        self._wanted_at: float | None = None  # since when the consumer waits; None while it is busy
        self._stopped = False
        self.scoring: set[asyncio.Task[None]] = set()
        self.generating_s = 0.0  # until the last sample finished
        self.scoring_s = 0.0  # from then to the last reward
        self._all_finished = not batch.unfinished

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        for _ in self._batch.samples:
            self._wanted_at = self._rollout.clock.now()
            item = await self._scored.get()
            self._wanted_at = None
            if self._stopped:
                raise StopRequested
            if isinstance(item, Exception):
                raise item
            yield item

    # The tasks that only write letters.

    async def receive(self) -> None:
        try:
            while True:
                report = await self._rollout.worker.next_report(RECEIVE_S)
                if report is not None:
                    self._mail.reports.append(report)
                    self._arrived.set()
        except Exception as error:  # noqa: BLE001 - the iteration raises it
            self._fail(error)

    async def watch_stop(self) -> None:
        await self._rollout.stop.wait()
        self._mail.stop = True
        self._arrived.set()

    async def _score(self, sample: Sample) -> None:
        try:
            reward = await self._rollout.scorer.score(sample.prompt, self._trajectory(sample))
        except Exception as error:  # noqa: BLE001 - the iteration raises it
            self._fail(error)
        else:
            self._mail.rewards.append((sample, reward))
            self._arrived.set()

    def _fail(self, error: Exception) -> None:
        self._mail.failures.append(error)
        self._arrived.set()

    # The task that owns the batch.

    async def run(self) -> None:
        try:
            self._tell_progress()
            self._release(self._batch.in_state(SampleState.SCORED))
            self._start_scoring(self._batch.in_state(SampleState.FINISHED))
            await self._submit_waiting()
            while not self._batch.complete:
                mail = await self._letters()
                await self._digest(mail)
                if mail.stop:
                    await self._call_back()
                    raise StopRequested
                await self._submit_waiting()
        except Exception as error:  # noqa: BLE001 - the iteration raises it
            self._stopped = isinstance(error, StopRequested)
            self._scored.put_nowait(error)

    async def _letters(self) -> _Mail:
        """Everything that has arrived, after waiting a while for something."""
        if not self._mail:
            self._arrived.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), self._rollout.patience.notice_s)
        mail, self._mail = self._mail, _Mail()
        if mail.news:
            self._news_at = self._noticed_at = self._rollout.clock.now()
        else:
            self._judge_silence()
        return mail

    def _judge_silence(self) -> None:
        """The mailbox is empty but for heartbeats: say so, or give up."""
        if self._wanted_at is None:  # the consumer is busy, maybe on the engine's own thread: silence is no news
            return
        now, patience = self._rollout.clock.now(), self._rollout.patience
        wait, waited_s = self._wait(), now - max(self._news_at, self._wanted_at)
        if waited_s >= wait.deadline_s or now - max(self._noticed_at, self._wanted_at) >= patience.notice_s:
            self._noticed_at = now
            still_waiting(wait, waited_s=waited_s, telemetry=self._rollout.telemetry)

    def _wait(self) -> Wait:
        batch, patience = self._batch, self._rollout.patience
        name = f"step {batch.plan.step} ({batch.plan.purpose})"
        if batch.unfinished:
            ignored = f" (messages ignored: {dict(batch.ignored)})" if batch.ignored else ""
            return Wait(
                awaited=f"tokens of {batch.unfinished} samples of {name}",
                look_at=f"the worker and its engine{ignored}",
                deadline_s=patience.worker_s,
            )
        return Wait(
            awaited=f"rewards of {len(self.scoring)} samples of {name}",
            look_at="the reward functions of [scoring]",
            deadline_s=patience.scorer_s,
        )

    async def _digest(self, mail: _Mail) -> None:
        """Journal what came, then act on it."""
        batch, rollout = self._batch, self._rollout
        for report in mail.reports:
            rollout.note_status(report, batch)
        self._start_scoring(await rollout.ledger.accept(batch, mail.reports))
        await rollout.ledger.reward(batch, mail.rewards)
        self._release([sample for sample, _ in mail.rewards])
        self._keep_time()
        self._tell_progress()
        for error in mail.failures:
            raise error

    def _tell_progress(self) -> None:
        self._rollout.telemetry.progress(self._rollout.phase, self._batch.scored, len(self._batch.samples))

    def _keep_time(self) -> None:
        elapsed_s = self._rollout.clock.now() - self._began
        if not self._all_finished:
            self.generating_s, self._all_finished = elapsed_s, not self._batch.unfinished
        self.scoring_s = elapsed_s - self.generating_s

    async def _submit_waiting(self) -> None:
        """Submit what waits, called-back and failed samples included: each goes on from the tokens it has."""
        batch, worker = self._batch, self._rollout.worker
        if batch.unfinished == batch.running:
            return
        failed = [sample for sample in batch.in_state(SampleState.WAITING) if sample.failures]
        for sample in failed:
            if sample.failures >= MAX_FAILURES:
                raise TidemillError(
                    f"{sample.failures} attempts to generate {sample.sample_id} failed; the last: {sample.last_error}"
                )
        if failed:  # an engine may still be at the attempt that went wrong
            await self._to_worker(worker.abort([sample.sample_id for sample in failed]), "drop samples")
        await self._to_worker(worker.submit(batch.assign(self._rollout.lease_id)), "take samples")

    async def _call_back(self) -> None:
        """Take samples back from the worker; what they had is in the reports that follow."""
        running = [sample.sample_id for sample in self._batch.in_state(SampleState.RUNNING)]
        if running:
            await self._to_worker(self._rollout.worker.abort(running), "hand samples back")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rollout.patience.stop_s):
                while self._batch.running:
                    await self._digest(await self._letters())

    async def _to_worker(self, call: Coroutine[Any, Any, None], what: str) -> None:
        deadline_s = self._rollout.patience.load_s
        await self._rollout.patiently(
            call, awaited=f"the worker to {what}", look_at="the worker and its engine", deadline_s=deadline_s
        )

    def _start_scoring(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            task = asyncio.create_task(self._score(sample))
            self.scoring.add(task)
            task.add_done_callback(self.scoring.discard)

    def _release(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            assert sample.reward is not None
            trajectory = scored(self._trajectory(sample), sample.reward, truncated=self._rollout.truncated)
            self._scored.put_nowait(trajectory)

    def _trajectory(self, sample: Sample) -> Trajectory:
        return sample.trajectory(self._rollout.codec.decode(unpack_tokens(bytes(sample.token_ids))))
