"""Collects scored samples, one by one as they finish.

```
 in flight ──dispatcher──▶ fleet ──reports, lease outcomes──┐
   ▲                                                        ▼
   │                                                    ( mailbox ) ◀──rewards── scorer ◀──┐
   │                                                        │                              │
   └────── ledger: apply, journal, revoke ◀─────────────────┴───▶ finished samples ────────┘
                                                            ├───▶ scored samples ──▶ consumer
                                                            └───▶ turns of agents that ended ──▶ environments
```
One task reads the mailbox and changes samples; the fleet and the scorers only write messages. Generating, journalling
and scoring continue while the consumer (the trainer) is busy, and the consumer may start, restart and drop groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from tidemill.controller.acting import ActingEpisodes
from tidemill.controller.batching import scored
from tidemill.controller.dispatcher import Dispatcher
from tidemill.controller.in_flight import LOCAL, InFlight
from tidemill.controller.offload import Balance
from tidemill.controller.rollout_context import RolloutContext, StopRequested
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.waiting import Mailbox, Messages, Wait, log_waiting
from tidemill.core.errors import DeadlineError
from tidemill.core.records import Observation, Trajectory, count

T = TypeVar("T")

GATHER_S = 1e-4
"""Delay per worker before the mailbox is read, so that with many workers several reports are processed together."""

FLEET_VIEW_S = 0.5
"""Interval of the live view's fleet rows."""


@asynccontextmanager
async def collect_samples(
    in_flight: InFlight, rollout: RolloutContext, *, endless: bool = False
) -> AsyncIterator[SampleCollector]:
    """Generate and score the samples in flight; the collector returns them in the order they are scored.

    Args:
        endless: groups may be started at any time; otherwise collecting ends when everything in flight is scored.

    Asking for the next sample raises:
        StopRequested: `rollout.stop` was set; running samples were aborted and their tokens journalled.
        DeadlineError: the workers or the scorer made no progress for too long.
        TidemillError: the engine failed repeatedly on one sample.
        GuardStop: machines live shorter than the recomputation of a sample, and there is no reserved engine.
        Exception: any error of the local worker, the provider, the scorer or the journal.
    """
    collector = SampleCollector(in_flight, rollout, endless=endless)
    with rollout.fleet.delivering_to(collector.mailbox):
        tasks = [asyncio.create_task(job) for job in (collector.run(), collector.watch_stop())]
        try:
            yield collector
        finally:
            jobs = [*tasks, *collector.scoring, *collector.acting.tasks]
            for task in jobs:
                task.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            collector.dispatcher.abort_all()


class SampleCollector:
    """The state of one `collect_samples`."""

    def __init__(self, in_flight: InFlight, rollout: RolloutContext, *, endless: bool = False) -> None:
        self._in_flight, self._rollout, self._endless = in_flight, rollout, endless
        self.dispatcher = Dispatcher(in_flight, rollout.fleet, window_s=rollout.window_s, gives_up=rollout.gives_up)
        self.mailbox = Mailbox()
        self._scored: asyncio.Queue[tuple[Sample, int] | Exception | None] = asyncio.Queue()  # None: new tokens matter
        self._woken = False  # None is in the queue
        self._progress_at = self._logged_at = rollout.clock.now()
        self._consumer_waits_since: float | None = None  # None while the consumer is busy
        self._failure: Exception | None = None  # no more samples will come
        self._paused: asyncio.Event | None = None  # while pausing; set when nothing is running
        self._processed = asyncio.Event()  # set after messages changed samples, and at a failure
        self._batch_samples = len(in_flight.samples)
        self.scoring: set[asyncio.Task[None]] = set()
        self.acting = ActingEpisodes(in_flight, rollout, self.mailbox)
        self.waited_s = 0.0  # by the consumer, in this step
        self.idle_s = 0.0  # part of it in which the local worker did not generate
        self._fleet_shown_at = -FLEET_VIEW_S
        self.on_tainted: Callable[[], Awaitable[None]] | None = None  # the consumer's; called while it waits
        self.ranking_may_change: Callable[[], bool] | None = None  # whether new tokens may decide about a batch

    @property
    def failed(self) -> bool:
        """Whether no more samples will come; `next` says why."""
        return self._failure is not None

    def begin_step(self, *, samples: int, window_s: float, balance: Balance | None = None) -> None:
        """Start the next batch, of `samples` samples; the local worker generates for `window_s` seconds, too."""
        self._batch_samples = samples
        self.waited_s = 0.0
        self.idle_s = 0.0
        self.dispatcher.begin_step(window_s, balance, samples=samples)
        self.mailbox.notify()

    async def next(self) -> Trajectory:
        """Wait for the next scored sample."""
        while (trajectory := await self.next_change()) is None:
            pass
        return trajectory

    async def next_change(self) -> Trajectory | None:
        """Wait for the next scored sample, or for tokens that may decide about a batch (None)."""
        while True:
            since_s = self._consumer_waits_since = self._rollout.clock.now()
            item = await self._scored.get()
            now_s, idle_since_s = self._rollout.clock.now(), self.dispatcher.local_idle_since_s
            self.waited_s += now_s - since_s
            if idle_since_s is not None:
                self.idle_s += max(0.0, now_s - max(since_s, idle_since_s))
            self._consumer_waits_since = None
            if isinstance(self._failure, StopRequested):
                raise self._failure
            if isinstance(item, Exception):
                raise item
            if item is None:
                self._woken = False
                if self.on_tainted is not None:
                    await self.on_tainted()
                return None
            sample, attempt = item
            if self._in_flight.is_current(sample, attempt, SampleState.SCORED):
                assert sample.reward is not None
                return scored(
                    self._trajectory(sample),
                    sample.reward,
                    ref_logprobs=sample.ref_logprobs,
                    truncated=self._rollout.truncated,
                )

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        """All samples that were in flight when the iteration began."""
        for _ in range(len(self._in_flight.samples)):
            yield await self.next()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Abort all running samples, and generate nothing while the block runs."""
        self._paused = asyncio.Event()
        if self._failure is None:
            self.dispatcher.abort_all()
            self.mailbox.notify()
            await self._wait_until_paused(self._paused)
        if self._failure is not None:  # possibly since then: the workers may still be busy
            raise self._failure
        try:
            yield
        finally:
            self._paused = None
            self.mailbox.notify()

    async def until_local_returned(self) -> None:
        """Wait until the local worker has returned the samples that are not needed."""

        async def returned() -> None:
            while any(not sample.needed for sample in self._in_flight.held(LOCAL).values()):
                if self._failure is not None:
                    raise self._failure
                self._processed.clear()
                await self._processed.wait()

        await self._rollout.wait_for(
            returned(),
            awaited="samples to be handed back",
            look_at="the reserved engine",
            deadline_s=self._rollout.timeouts.worker_s,
        )

    async def _wait_until_paused(self, paused: asyncio.Event) -> None:
        """Wait until no sample is running; preemptible workers that do not return theirs in time lose their leases."""
        deadline_s = self._rollout.timeouts.worker_s
        while not paused.is_set():
            try:
                await self._rollout.wait_for(
                    paused.wait(),
                    awaited="samples to be handed back",
                    look_at="the workers and their engines",
                    deadline_s=deadline_s,
                )
            except DeadlineError:
                if not self._end_unproductive_leases(deadline_s):
                    raise

    # Tasks that write messages.

    async def watch_stop(self) -> None:
        await self._rollout.stop.wait()
        self.mailbox.messages.stop = True
        self.mailbox.notify()

    async def _score(self, sample: Sample) -> None:
        """Reward and reference logprobs; a sample whose reward the journal has lacks only the latter."""
        attempt, frozen, scorer = sample.attempt, self._rollout.frozen_scoring, self._rollout.scorer
        trajectory = self._trajectory(sample)
        try:
            if frozen is None or frozen.reference is None:
                reward, ref_logprobs = await scorer.score(sample.prompt, trajectory), b""
            elif sample.reward is None:
                scoring = scorer.score(sample.prompt, trajectory)
                reward, ref_logprobs = await asyncio.gather(scoring, frozen.ref_logprobs(trajectory))
            else:
                reward, ref_logprobs = sample.reward, await frozen.ref_logprobs(trajectory)
            self.mailbox.messages.rewards.append((sample, attempt, reward, ref_logprobs))
            self.mailbox.notify()
        except Exception as error:  # noqa: BLE001 - `next` raises it
            self.mailbox.put_failure(error)

    def _start(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        self.scoring.add(task)
        task.add_done_callback(self.scoring.discard)

    # The task that reads them.

    async def run(self) -> None:
        try:
            self._show_progress()
            incomplete = self._in_flight.in_state(SampleState.FINISHED)
            scored, frozen = self._in_flight.in_state(SampleState.SCORED), self._rollout.frozen_scoring
            if frozen is None or frozen.reference is None:
                self._emit(scored)
            else:  # reference logprobs are not journalled
                incomplete = [*scored, *incomplete]
            for sample in incomplete:
                self._start(self._score(sample))
            self._in_flight.take_opened()
            self.acting.start(self._in_flight.in_state(SampleState.ACTING))
            self._dispatch()
            while self._endless or not self._in_flight.all_scored:
                messages = await self._receive()
                await self._process(messages)
                if messages.stop:
                    await self._abort_running()
                    raise StopRequested
                self.acting.start(self._in_flight.take_opened())
                self._dispatch()
        except Exception as error:  # noqa: BLE001 - `next` raises it
            self._failure = error
            self._processed.set()
            self._scored.put_nowait(error)
            if self._paused is not None:
                self._paused.set()

    async def _receive(self) -> Messages:
        if self._rollout.fleet.elastic:
            await asyncio.sleep(GATHER_S * self._rollout.fleet.preemptible_count)
        return await self.mailbox.take(min(self._rollout.timeouts.notice_s, self.dispatcher.next_check_s))

    async def _process(self, messages: Messages) -> None:
        """Journal the messages, then act on them. Reports that arrived before a lease ended are applied first."""
        in_flight, rollout = self._in_flight, self._rollout
        tokens_before = in_flight.counters.tokens_accepted
        for report in messages.reports:
            rollout.update_status(report, in_flight.counters)
        ended = await rollout.ledger.accept(in_flight, messages.reports)
        if messages.progress or ended or in_flight.counters.tokens_accepted != tokens_before:
            self._progress_at = self._logged_at = rollout.clock.now()
        else:
            self._check_deadline()
        for lease_id, verdict in in_flight.take_invalid_leases().items():
            rollout.fleet.end_lease(lease_id, f"it sent an invalid delta ({verdict})")
        if observers := rollout.all_observers:
            ids = [delta.sample_id for report in messages.reports for delta in report.deltas]
            changed = [sample for sample_id in ids if (sample := in_flight.get(sample_id)) is not None]
            for observer in observers:
                observer.tokens_added(changed)
        self.dispatcher.note_ended(ended)
        self._finish(ended)
        self.acting.start(ended)
        await self._observe(messages)
        for outcome in messages.ended:
            self.dispatcher.note_evicted(outcome)
            samples = in_flight.revoke(outcome.lease_id)
            most = sum(in_flight.plan.sampling.max_new_tokens - sample.generated for sample in samples)
            rollout.fleet.event_log.ended(outcome, samples, most_lost=most)
            if outcome.crashed:
                for sample in samples:
                    sample.failures += 1
                    sample.last_error = outcome.cause
        self.dispatcher.drain(messages.draining)
        self.dispatcher.note_idle(dict.fromkeys(report.lease_id for report in messages.reports))
        self._emit(await self._store_rewards(messages))
        ranks = self.ranking_may_change is not None and self.ranking_may_change()
        if (messages.tainted or ranks) and not self._woken:
            self._woken = True
            self._scored.put_nowait(None)
        self._show_progress()
        self._processed.set()
        for error in messages.failures:
            raise error

    def _finish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if self._in_flight.is_current(sample, sample.attempt, SampleState.FINISHED):
                sample.finished_s = self._rollout.clock.now()
                prompt_tokens = count(sample.prompt.token_ids)
                self._rollout.fleet.lengths.observe(sample.sample_id.prompt_id, prompt_tokens, [sample.generated])
                if self._rollout.frozen_scoring is not None:
                    self._rollout.frozen_scoring.finished(sample)
                if self._rollout.environments is not None:
                    self._rollout.environments.forget([sample.sample_id])
                self._start(self._score(sample))

    async def _observe(self, messages: Messages) -> None:
        """Journal environments' answers; their samples wait for an engine again, or are finished."""
        answers: dict[int, tuple[Sample, Observation]] = {}  # by ordinal; an answer that arrives twice counts once
        for sample, attempt, answer in messages.observations:
            if self._in_flight.is_current(sample, attempt, SampleState.ACTING):
                answers.setdefault(sample.ordinal, (sample, answer))
        await self._rollout.ledger.observe(self._in_flight, list(answers.values()))
        self._finish([sample for sample, _ in answers.values()])

    async def _store_rewards(self, messages: Messages) -> list[Sample]:
        """Journal rewards; returns the samples that may be trained on now."""
        rewards = []
        restored = []
        for sample, attempt, reward, ref_logprobs in messages.rewards:
            if self._in_flight.is_current(sample, attempt, SampleState.FINISHED):
                rewards.append((sample, reward))
            elif self._in_flight.is_current(sample, attempt, SampleState.SCORED):
                restored.append(sample)
            else:
                continue
            sample.ref_logprobs = ref_logprobs
        await self._rollout.ledger.record_rewards(self._in_flight, rewards)
        return [*(sample for sample, _ in rewards), *restored]

    def _emit(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.scored_s = self._rollout.clock.now()
            self._scored.put_nowait((sample, sample.attempt))

    def _dispatch(self) -> None:
        """Assign waiting samples, unless paused."""
        if self._paused is not None:
            if not self._in_flight.running:
                self._paused.set()
            return
        if self.dispatcher.dispatch(trainer_waits=self._consumer_waits_since is not None):
            self._progress_at = self._logged_at = self._rollout.clock.now()  # the deadline starts at the assignment

    async def _abort_running(self) -> None:
        """Abort running samples, and journal the tokens that the workers still report, and the results of calls that
        must not be repeated."""
        self.dispatcher.abort_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rollout.timeouts.stop_s):
                while self._in_flight.running or self.acting.has_unrepeatable_call:
                    await self._process(await self._receive())

    # Deadlines and progress.

    def _check_deadline(self) -> None:
        """Without progress: log the wait, and at the deadline end leases or fail."""
        if self._consumer_waits_since is None:  # the consumer may be using the engine's own thread
            return
        now, timeouts = self._rollout.clock.now(), self._rollout.timeouts
        wait, waited_s = self._current_wait(), now - max(self._progress_at, self._consumer_waits_since)
        if waited_s >= wait.deadline_s and self._in_flight.running and self._end_unproductive_leases(waited_s):
            return
        if waited_s >= wait.deadline_s or now - max(self._logged_at, self._consumer_waits_since) >= timeouts.notice_s:
            self._logged_at = now
            log_waiting(wait, waited_s=waited_s, telemetry=self._rollout.telemetry)

    def _end_unproductive_leases(self, waited_s: float) -> bool:
        """End the leases of preemptible workers that hold samples; returns whether there were any."""
        cause = f"it sends reports, but no new tokens for {waited_s:.0f} s"
        ended = [self._rollout.fleet.end_lease(lease_id, cause) for lease_id in self._in_flight.leases]
        return any(ended)

    def _current_wait(self) -> Wait:
        batch, timeouts = self._in_flight, self._rollout.timeouts
        name = f"step {batch.newest_version + self._endless} ({batch.plan.purpose})"
        if batch.acting and batch.acting == batch.unfinished:
            opens = batch.plan.agent is not None and batch.plan.agent.opens
            return Wait(
                awaited=f"the {'clients' if opens else 'environments'} of {batch.acting} samples of {name}",
                look_at="[gateway] and the agents that ask it" if opens else "[env] and the environment's tools",
                deadline_s=timeouts.act_s,
            )
        if batch.unfinished and not batch.running:
            return Wait(
                awaited=f"a worker to generate {batch.unfinished} samples of {name}",
                look_at=f"[pool] and the machines it offers ({self._rollout.fleet.preemptible_count} joining)",
                deadline_s=timeouts.pool_s,
            )
        if batch.unfinished:
            ignored = f" (deltas ignored: {dict(batch.counters.ignored)})" if batch.counters.ignored else ""
            return Wait(
                awaited=f"tokens of {batch.unfinished} samples of {name}",
                look_at=f"the worker and its engine{ignored}",
                deadline_s=timeouts.worker_s,
            )
        return Wait(
            awaited=f"rewards of {len(self.scoring)} samples of {name}",
            look_at="the reward functions of [scoring]",
            deadline_s=timeouts.scorer_s,
        )

    def _show_progress(self) -> None:
        telemetry = self._rollout.telemetry
        fleet = self._rollout.fleet
        now_s = self._rollout.clock.now()
        telemetry.progress(self._rollout.phase, min(self._in_flight.scored, self._batch_samples), self._batch_samples)
        if fleet.elastic and now_s - self._fleet_shown_at >= FLEET_VIEW_S:
            self._fleet_shown_at = now_s
            telemetry.fleet(fleet.rows())

    def _trajectory(self, sample: Sample) -> Trajectory:
        if sample.decoded is None:  # cached: needed for scoring and for training
            sample.decoded = sample.trajectory(self._rollout.codec.decode)
        return sample.decoded
