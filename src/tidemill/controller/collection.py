"""From an open batch to its scored samples, one by one as they finish.

```
 batch ──dispatcher──▶ fleet ──reports, ends of leases──┐
   ▲                                                    ▼
   │                                                ( mailbox ) ◀──rewards── scorer ◀──┐
   │                                                    │                              │
   └──── ledger: apply, journal, take back ◀────────────┴───▶ finished samples ────────┘
                                                        └───▶ scored samples ──▶ whoever iterates
```
One task owns the batch and reads the mailbox; the fleet and the scorers only put letters into it. The consumer may take
its time (the trainer does): generating, journalling and scoring go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from tidemill.controller.assembly import scored
from tidemill.controller.batch import Batch
from tidemill.controller.dispatcher import Dispatcher
from tidemill.controller.mailbox import Ended, Mail, Mailbox
from tidemill.controller.rollout import Rollout, StopRequested
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.waiting import Wait, still_waiting
from tidemill.core.buffers import unpack_tokens
from tidemill.core.records import Trajectory

GATHER_S = 1e-4
"""By worker: letters are read several at a time, with 1,000 workers 10 times a second. A look costs time by worker."""

WATCH_S = 0.5
"""How often the live view hears of the fleet."""


@asynccontextmanager
async def collecting(batch: Batch, rollout: Rollout) -> AsyncIterator[Collection]:
    """Generate and score a batch: yields its scored samples in the order they come.

    The iteration raises:
        StopRequested: `rollout.stop` was set; the samples in flight were called back and what they had is journalled.
        DeadlineError: nothing came from the workers or the scorer for too long.
        TidemillError: the engine failed again and again on one sample.
        Exception: whatever the reserved worker, the provider of leases, the scorer or the journal raised.
    """
    collection = Collection(batch, rollout)
    with rollout.fleet.delivering_to(collection.mailbox):
        tasks = [asyncio.create_task(job) for job in (collection.run(), collection.watch_stop())]
        try:
            yield collection
        finally:
            for task in (*tasks, *collection.scoring):
                task.cancel()
            await asyncio.gather(*tasks, *collection.scoring, return_exceptions=True)
            for lease_id in batch.leases:
                rollout.fleet.abort(lease_id, [sample.sample_id for sample in batch.held(lease_id).values()])


class Collection:
    """The state of one `collecting`; iterate over it for the scored samples."""

    def __init__(self, batch: Batch, rollout: Rollout) -> None:
        self._batch, self._rollout = batch, rollout
        self._dispatcher = Dispatcher(batch, rollout.fleet, window_s=rollout.window_s)
        self.mailbox = Mailbox()
        self._scored: asyncio.Queue[Trajectory | Exception] = asyncio.Queue()
        self._began = self._news_at = self._noticed_at = rollout.clock.now()
        self._wanted_at: float | None = None  # since when the consumer waits; None while it is busy
        self._stopped = False
        self.scoring: set[asyncio.Task[None]] = set()
        self.generating_s = 0.0  # until the last sample finished
        self.scoring_s = 0.0  # from then to the last reward
        self.waited_s = 0.0  # by the consumer, while the reserved side was not generating
        self._watched_at = -WATCH_S
        self._all_finished = not batch.unfinished

    @property
    def workers_mean(self) -> float:
        """Preemptible workers that served, on average."""
        return self._dispatcher.workers_mean

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        for _ in self._batch.samples:
            self._wanted_at = self._rollout.clock.now()
            item = await self._scored.get()
            self._count_wait(self._wanted_at)
            self._wanted_at = None
            if self._stopped:
                raise StopRequested
            if isinstance(item, Exception):
                raise item
            yield item

    # The tasks that only write letters.

    async def watch_stop(self) -> None:
        await self._rollout.stop.wait()
        self.mailbox.mail.stop = True
        self.mailbox.ring()

    async def _score(self, sample: Sample) -> None:
        try:
            reward = await self._rollout.scorer.score(sample.prompt, self._trajectory(sample))
        except Exception as error:  # noqa: BLE001 - the iteration raises it
            self.mailbox.put_failure(error)
        else:
            self.mailbox.mail.rewards.append((sample, reward))
            self.mailbox.ring()

    # The task that owns the batch.

    async def run(self) -> None:
        try:
            self._tell_progress()
            self._release(self._batch.in_state(SampleState.SCORED))
            self._start_scoring(self._batch.in_state(SampleState.FINISHED))
            self._dispatch()
            while not self._batch.complete:
                mail = await self._letters()
                await self._digest(mail)
                if mail.stop:
                    await self._call_back()
                    raise StopRequested
                self._dispatch()
        except Exception as error:  # noqa: BLE001 - the iteration raises it
            self._stopped = isinstance(error, StopRequested)
            self._scored.put_nowait(error)

    async def _letters(self) -> Mail:
        """Everything that has arrived, after waiting a while for something."""
        if self._rollout.fleet.elastic:
            await asyncio.sleep(GATHER_S * self._rollout.fleet.preemptible)
        return await self.mailbox.take(min(self._rollout.patience.notice_s, self._dispatcher.window_left_s))

    def _judge_silence(self) -> None:
        """Nothing came that was of use: say so, and give up on those who should have sent it."""
        if self._wanted_at is None:  # the consumer is busy, maybe on the engine's own thread: silence is no news
            return
        now, patience = self._rollout.clock.now(), self._rollout.patience
        wait, waited_s = self._wait(), now - max(self._news_at, self._wanted_at)
        if waited_s >= wait.deadline_s and self._batch.running and self._dismiss_useless(waited_s):
            return  # their samples go on elsewhere
        if waited_s >= wait.deadline_s or now - max(self._noticed_at, self._wanted_at) >= patience.notice_s:
            self._noticed_at = now
            still_waiting(wait, waited_s=waited_s, telemetry=self._rollout.telemetry)

    def _dismiss_useless(self, waited_s: float) -> bool:
        """Workers that say things, but nothing of what they were given, lose their leases; whether there were any."""
        cause = f"it was heard of, but {waited_s:.0f} s without a token that is of use"
        dismissed = [self._rollout.fleet.dismiss(lease_id, cause) for lease_id in self._batch.leases]
        return any(dismissed)

    def _wait(self) -> Wait:
        batch, patience = self._batch, self._rollout.patience
        name = f"step {batch.plan.step} ({batch.plan.purpose})"
        if batch.unfinished and not batch.running:
            return Wait(
                awaited=f"a worker to generate {batch.unfinished} samples of {name}",
                look_at=f"[pool] and the machines it offers ({self._rollout.fleet.preemptible} joining)",
                deadline_s=patience.pool_s,
            )
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

    async def _digest(self, mail: Mail) -> None:
        """Journal what came, then act on it. What a worker said before its lease ended counts."""
        batch, rollout = self._batch, self._rollout
        tokens_before = batch.tokens_accepted
        for report in mail.reports:
            rollout.note_status(report, batch)
        finished = await rollout.ledger.accept(batch, mail.reports)
        if mail.news or finished or batch.tokens_accepted > tokens_before:
            self._news_at = self._noticed_at = rollout.clock.now()
        else:
            self._judge_silence()
        for lease_id, verdict in batch.take_misfits().items():
            rollout.fleet.dismiss(lease_id, f"it sent what does not fit ({verdict})")
        for sample in finished:
            rollout.fleet.lengths.observe(sample.sample_id.prompt_id, sample.length)
        self._start_scoring(finished)
        for ended in mail.ended:
            self._take_back(ended)
        self._dispatcher.hand_back(mail.hand_back)
        self._dispatcher.note_idle({report.lease_id for report in mail.reports})
        await rollout.ledger.reward(batch, mail.rewards)
        self._release([sample for sample, _ in mail.rewards])
        self._keep_time()
        self._tell_progress()
        for error in mail.failures:
            raise error

    def _take_back(self, ended: Ended) -> None:
        """The samples of a worker that is gone wait for another, each with the tokens it has."""
        samples = self._batch.revoke(ended.lease_id)
        if ended.evicted:
            self._batch.evictions += 1
            self._batch.tokens_lost += ended.tokens_lost if samples else 0
            self._rollout.fleet.story.evicted(ended, samples)
        if ended.crashed:
            for sample in samples:
                sample.failures += 1
                sample.last_error = ended.cause

    def _tell_progress(self) -> None:
        telemetry, fleet, now_s = self._rollout.telemetry, self._rollout.fleet, self._rollout.clock.now()
        telemetry.progress(self._rollout.phase, self._batch.scored, len(self._batch.samples))
        if fleet.elastic and now_s - self._watched_at >= WATCH_S:
            self._watched_at = now_s
            telemetry.fleet(fleet.rows())

    def _keep_time(self) -> None:
        elapsed_s = self._rollout.clock.now() - self._began
        if not self._all_finished:
            self.generating_s, self._all_finished = elapsed_s, not self._batch.unfinished
        self.scoring_s = elapsed_s - self.generating_s

    def _dispatch(self) -> None:
        """Give out what waits, called-back and failed samples included: each goes on from the tokens it has."""
        trainable = -(-self._scored.qsize() // self._batch.plan.group_size)
        if self._dispatcher.dispatch(trainable_groups=trainable):
            self._news_at = self._noticed_at = self._rollout.clock.now()  # an answer is awaited from now on

    async def _call_back(self) -> None:
        """Take samples back from the workers; what they had is in the reports that follow."""
        self._dispatcher.call_back_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rollout.patience.stop_s):
                while self._batch.running:
                    await self._digest(await self._letters())

    def _count_wait(self, since_s: float) -> None:
        """The reserved side has nothing to do while the consumer waits and the window is over."""
        idle_since_s = self._dispatcher.seeded_until_s
        if idle_since_s is not None:
            self.waited_s += max(0.0, self._rollout.clock.now() - max(since_s, idle_since_s))

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
