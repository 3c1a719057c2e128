"""From samples in flight to scored samples, one by one as they finish.

```
 in flight ──dispatcher──▶ fleet ──reports, ends of leases──┐
   ▲                                                        ▼
   │                                                    ( mailbox ) ◀──rewards── scorer ◀──┐
   │                                                        │                              │
   └────── ledger: apply, journal, take back ◀──────────────┴───▶ finished samples ────────┘
                                                            └───▶ scored samples ──▶ whoever asks for the next
```
One task reads the mailbox and changes samples by what it says; the fleet and the scorers only put letters into it. The
consumer may take its time (the trainer does): generating, journalling and scoring go on meanwhile. It may also begin,
restart and give up groups meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tidemill.controller.batching import scored
from tidemill.controller.dispatcher import Dispatcher
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import InFlight, StepCounters
from tidemill.controller.ledger import Ledger
from tidemill.controller.offload import Balance, HandOver
from tidemill.controller.reading import Reading
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.waiting import (
    LeaseOutcome,
    Mailbox,
    Messages,
    Timeouts,
    Wait,
    still_waiting,
    wait_with_deadline,
)
from tidemill.core.errors import DeadlineError
from tidemill.core.protocols import Clock, Codec, Scorer, Telemetry
from tidemill.core.records import Trajectory, WorkerReport, WorkerStatus, view_tokens
from tidemill.telemetry.events import WAIT_ABANDONED, span

T = TypeVar("T")


class StopRequested(Exception):
    """The user asked the run to stop; what was collected is journalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Who generates, who judges, and where it is noted."""

    fleet: Fleet
    ledger: Ledger
    scorer: Scorer
    codec: Codec
    telemetry: Telemetry
    clock: Clock
    stop: asyncio.Event  # set by whoever wants the run to end
    timeouts: Timeouts = field(default_factory=Timeouts)
    truncated: Literal["trained", "masked"] = "trained"  # what a completion cut by the token limit counts
    phase: str = "rollout"
    window_s: float = math.inf  # how long the reserved side generates beside preemptible workers
    reading: Reading | None = None  # None where no model reads samples one by one
    newest: dict[str, WorkerStatus] = field(default_factory=dict)  # what each said last, by lease: engines count anew

    async def patiently(self, call: Coroutine[Any, Any, T], *, awaited: str, look_at: str, deadline_s: float) -> T:
        """Await with "waiting" events and a deadline.

        Raises:
            DeadlineError: it took longer than `deadline_s` seconds.
        """
        wait = Wait(awaited=awaited, look_at=look_at, deadline_s=deadline_s)
        return await wait_with_deadline(
            call, wait, notice_s=self.timeouts.notice_s, telemetry=self.telemetry, clock=self.clock
        )

    async def unless_stopped(self, call: Coroutine[Any, Any, T], *, awaited: str, lost: str) -> T:
        """Await; from when the run is to end on, for `timeouts.stop_s` seconds at most.

        Args:
            lost: what is, when that is over; told with the event.

        Raises:
            StopRequested: it is over, and `call` was cancelled.
        """
        task, stop = asyncio.ensure_future(call), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=self.timeouts.stop_s)
            if not task.done():
                self.telemetry.event(WAIT_ABANDONED, awaited=awaited, waited_s=self.timeouts.stop_s, lost=lost)
                raise StopRequested
            return task.result()
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """An event with a duration; a block left by `StopRequested` is told as interrupted, not as failed."""
        stopped: StopRequested | None = None
        with span(self.telemetry, self.clock, name, **fields) as told:
            try:
                yield told
            except StopRequested as request:
                told["interrupted"], stopped = True, request
        if stopped is not None:
            raise stopped

    def note_status(self, report: WorkerReport, counters: StepCounters) -> None:
        """Remember what a worker is doing; count the prompt tokens it computed since it last spoke."""
        status = report.status
        before = self.newest.get(report.lease_id)
        counters.prompt_tokens_computed += status.prompt_tokens_computed - (
            before.prompt_tokens_computed if before else 0
        )
        counters.prompt_tokens_reused += status.prompt_tokens_reused - (before.prompt_tokens_reused if before else 0)
        self.newest[report.lease_id] = status


GATHER_S = 1e-4
"""By worker: letters are read several at a time, with 1,000 workers 10 times a second. A look costs time by worker."""

WATCH_S = 0.5
"""How often the live view hears of the fleet."""


@asynccontextmanager
async def collect_samples(
    in_flight: InFlight, rollout: RolloutContext, *, endless: bool = False
) -> AsyncIterator[SampleCollector]:
    """Generate and score what is in flight: gives out scored samples in the order they come.

    Args:
        endless: groups may be begun at any time; else the collection ends when all that is in flight is scored.

    Asking for the next sample raises:
        StopRequested: `rollout.stop` was set; the samples in flight were called back and what they had is journalled.
        DeadlineError: nothing came from the workers or the scorer for too long.
        TidemillError: the engine failed again and again on one sample.
        Exception: whatever the reserved worker, the provider of leases, the scorer or the journal raised.
    """
    collection = SampleCollector(in_flight, rollout, endless=endless)
    with rollout.fleet.delivering_to(collection.mailbox):
        tasks = [asyncio.create_task(job) for job in (collection.run(), collection.watch_stop())]
        try:
            yield collection
        finally:
            for task in (*tasks, *collection.scoring):
                task.cancel()
            await asyncio.gather(*tasks, *collection.scoring, return_exceptions=True)
            for lease_id in in_flight.leases:
                rollout.fleet.abort(lease_id, [sample.sample_id for sample in in_flight.held(lease_id).values()])


class SampleCollector:
    """The state of one `collecting`."""

    def __init__(self, in_flight: InFlight, rollout: RolloutContext, *, endless: bool = False) -> None:
        self._in_flight, self._rollout, self._endless = in_flight, rollout, endless
        self._dispatcher = Dispatcher(in_flight, rollout.fleet, window_s=rollout.window_s)
        self.mailbox = Mailbox()
        self._scored: asyncio.Queue[tuple[Sample, int] | Exception] = asyncio.Queue()
        self._news_at = self._noticed_at = rollout.clock.now()
        self._wanted_at: float | None = None  # since when the consumer waits; None while it is busy
        self._over: Exception | None = None  # why nothing more will come
        self._paused: asyncio.Event | None = None  # set when nothing is being generated any more
        self._due = len(in_flight.samples)  # samples of the batch that is due
        self.scoring: set[asyncio.Task[None]] = set()
        self.waited_s = 0.0  # by the consumer, in this step
        self.idle_s = 0.0  # of that, while the reserved side was not generating either
        self._watched_at = -WATCH_S

    @property
    def workers_mean(self) -> float:
        """Preemptible workers that served in this step, on average."""
        return self._dispatcher.workers_mean

    @property
    def handed_over(self) -> HandOver | None:
        """When the reserved side stopped generating, where that was judged by what is left."""
        return self._dispatcher.handed_over

    def begin_step(self, *, samples: int, window_s: float, balance: Balance | None = None) -> None:
        """The next batch is due, of so many samples; the reserved side generates beside the others for a while."""
        self._due, self.waited_s, self.idle_s = samples, 0.0, 0.0
        self._dispatcher.begin_step(window_s, balance)
        self.look()

    def look(self) -> None:
        """Groups were begun, or begin again: there may be something to give out."""
        self.mailbox.ring()

    async def next(self) -> Trajectory:
        """The next scored sample, whenever it is there."""
        while True:
            self._wanted_at = self._rollout.clock.now()
            item = await self._scored.get()
            self._count_wait(self._wanted_at)
            self._wanted_at = None
            if isinstance(self._over, StopRequested):
                raise self._over
            if isinstance(item, Exception):
                raise item
            sample, attempt = item
            if self._is_current(sample, attempt, SampleState.SCORED):
                assert sample.reward is not None
                return scored(
                    self._trajectory(sample),
                    sample.reward,
                    ref_logprobs=sample.ref_logprobs,
                    truncated=self._rollout.truncated,
                )

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        """Every sample that was in flight when the iteration began."""
        for _ in range(len(self._in_flight.samples)):
            yield await self.next()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing is generated for as long as the block lasts: the workers are somebody else's."""
        self._paused = asyncio.Event()
        if self._over is None:
            self._dispatcher.call_back_all()
            self.look()
            await self._handed_back(self._paused)
        if self._over is not None:  # maybe since: then the workers are not free
            raise self._over
        try:
            yield
        finally:
            self._paused = None
            self.look()

    async def _handed_back(self, paused: asyncio.Event) -> None:
        """Wait for what was called back; a preemptible worker that does not hand it back in time loses its lease.

        Raises:
            DeadlineError: the reserved one does not.
        """
        deadline_s = self._rollout.timeouts.worker_s
        while not paused.is_set():
            try:
                await self._rollout.patiently(
                    paused.wait(),
                    awaited="samples to be handed back",
                    look_at="the workers and their engines",
                    deadline_s=deadline_s,
                )
            except DeadlineError:
                if not self._dismiss_useless(deadline_s):
                    raise

    # The tasks that only write letters.

    async def watch_stop(self) -> None:
        await self._rollout.stop.wait()
        self.mailbox.mail.stop = True
        self.mailbox.ring()

    async def _score(self, sample: Sample) -> None:
        attempt, reading, trajectory = sample.attempt, self._rollout.reading, self._trajectory(sample)
        scoring = self._rollout.scorer.score(sample.prompt, trajectory)
        try:
            if reading is None or reading.reference is None:
                reward, ref_logprobs = await scoring, b""
            else:
                reward, ref_logprobs = await asyncio.gather(scoring, reading.ref_logprobs(trajectory))
        except Exception as error:  # noqa: BLE001 - the iteration raises it
            self.mailbox.put_failure(error)
        else:
            self.mailbox.mail.rewards.append((sample, attempt, reward, ref_logprobs))
            self.mailbox.ring()

    async def _read_again(self, sample: Sample, reading: Reading) -> None:
        attempt = sample.attempt
        try:
            ref_logprobs = await reading.ref_logprobs(self._trajectory(sample))
        except Exception as error:  # noqa: BLE001 - the iteration raises it
            self.mailbox.put_failure(error)
        else:
            self.mailbox.mail.reread.append((sample, attempt, ref_logprobs))
            self.mailbox.ring()

    # The task that reads the letters.

    async def run(self) -> None:
        try:
            self._tell_progress()
            self._recall(self._in_flight.in_state(SampleState.SCORED))
            self._start_scoring(self._in_flight.in_state(SampleState.FINISHED))
            self._dispatch()
            while self._endless or not self._in_flight.complete:
                mail = await self._letters()
                await self._digest(mail)
                if mail.stop:
                    await self._call_back()
                    raise StopRequested
                self._dispatch()
        except Exception as error:  # noqa: BLE001 - whoever asks for the next sample gets it
            self._over = error
            self._scored.put_nowait(error)
            if self._paused is not None:
                self._paused.set()

    async def _letters(self) -> Messages:
        """Everything that has arrived, after waiting a while for something."""
        if self._rollout.fleet.elastic:
            await asyncio.sleep(GATHER_S * self._rollout.fleet.preemptible)
        return await self.mailbox.take(min(self._rollout.timeouts.notice_s, self._dispatcher.window_left_s))

    def _judge_silence(self) -> None:
        """Nothing came that was of use: say so, and give up on those who should have sent it."""
        if self._wanted_at is None:  # the consumer is busy, maybe on the engine's own thread: silence is no news
            return
        now, timeouts = self._rollout.clock.now(), self._rollout.timeouts
        wait, waited_s = self._wait(), now - max(self._news_at, self._wanted_at)
        if waited_s >= wait.deadline_s and self._in_flight.running and self._dismiss_useless(waited_s):
            return  # their samples go on elsewhere
        if waited_s >= wait.deadline_s or now - max(self._noticed_at, self._wanted_at) >= timeouts.notice_s:
            self._noticed_at = now
            still_waiting(wait, waited_s=waited_s, telemetry=self._rollout.telemetry)

    def _dismiss_useless(self, waited_s: float) -> bool:
        """Workers that say things, but nothing of what they were given, lose their leases; whether there were any."""
        cause = f"it was heard of, but {waited_s:.0f} s without a token that is of use"
        dismissed = [self._rollout.fleet.dismiss(lease_id, cause) for lease_id in self._in_flight.leases]
        return any(dismissed)

    def _wait(self) -> Wait:
        batch, timeouts = self._in_flight, self._rollout.timeouts
        name = f"step {batch.newest_version + self._endless} ({batch.plan.purpose})"
        if batch.unfinished and not batch.running:
            return Wait(
                awaited=f"a worker to generate {batch.unfinished} samples of {name}",
                look_at=f"[pool] and the machines it offers ({self._rollout.fleet.preemptible} joining)",
                deadline_s=timeouts.pool_s,
            )
        if batch.unfinished:
            ignored = f" (messages ignored: {dict(batch.counters.ignored)})" if batch.counters.ignored else ""
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

    async def _digest(self, mail: Messages) -> None:
        """Journal what came, then act on it. What a worker said before its lease ended counts."""
        in_flight, rollout = self._in_flight, self._rollout
        tokens_before = in_flight.counters.tokens_accepted
        for report in mail.reports:
            rollout.note_status(report, in_flight.counters)
        finished = await rollout.ledger.accept(in_flight, mail.reports)
        if mail.news or finished or in_flight.counters.tokens_accepted != tokens_before:
            self._news_at = self._noticed_at = rollout.clock.now()
        else:
            self._judge_silence()
        for lease_id, verdict in in_flight.take_misfits().items():
            rollout.fleet.dismiss(lease_id, f"it sent what does not fit ({verdict})")
        if rollout.reading is not None:
            rollout.reading.grown(in_flight, mail.reports)
        self._finish(finished)
        for ended in mail.ended:
            self._take_back(ended)
        self._dispatcher.hand_back(mail.hand_back)
        self._dispatcher.note_idle(dict.fromkeys(report.lease_id for report in mail.reports))
        self._release(await self._reward(mail))
        self._tell_progress()
        for error in mail.failures:
            raise error

    async def _reward(self, mail: Messages) -> list[Sample]:
        """Note rewards and what the reference said, durably; returns the samples that may be learned from now."""
        rewards = []
        for sample, attempt, reward, ref_logprobs in mail.rewards:
            if self._is_current(sample, attempt, SampleState.FINISHED):
                sample.ref_logprobs = ref_logprobs
                rewards.append((sample, reward))
        await self._rollout.ledger.reward(self._in_flight, rewards)
        reread = list[Sample]()
        for sample, attempt, ref_logprobs in mail.reread:
            if self._is_current(sample, attempt, SampleState.SCORED):
                sample.ref_logprobs = ref_logprobs
                reread.append(sample)
        return [*(sample for sample, _ in rewards), *reread]

    def _is_current(self, sample: Sample, attempt: int, state: SampleState) -> bool:
        """Whether a sample still is where it was: its group may have begun again, or been given up."""
        return sample.state is state and sample.attempt == attempt and sample.ordinal in self._in_flight.samples

    def _finish(self, samples: Sequence[Sample]) -> None:
        current = [sample for sample in samples if self._is_current(sample, sample.attempt, SampleState.FINISHED)]
        for sample in current:
            sample.finished_s = self._rollout.clock.now()
            self._rollout.fleet.lengths.observe(sample.sample_id.prompt_id, sample.length)
            if self._rollout.reading is not None:
                self._rollout.reading.finished(sample)
        self._start_scoring(current)

    def _take_back(self, ended: LeaseOutcome) -> None:
        """The samples of a worker that is gone wait for another, each with the tokens it has."""
        samples = self._in_flight.revoke(ended.lease_id)
        self._rollout.fleet.event_log.ended(ended, samples)
        if ended.crashed:
            for sample in samples:
                sample.failures += 1
                sample.last_error = ended.cause

    def _tell_progress(self) -> None:
        telemetry, fleet, now_s = self._rollout.telemetry, self._rollout.fleet, self._rollout.clock.now()
        telemetry.progress(self._rollout.phase, min(self._in_flight.scored, self._due), self._due)
        if fleet.elastic and now_s - self._watched_at >= WATCH_S:
            self._watched_at = now_s
            telemetry.fleet(fleet.rows())

    def _dispatch(self) -> None:
        """Give out what waits, called-back and failed samples included: each goes on from the tokens it has."""
        if self._paused is not None:
            if not self._in_flight.running:
                self._paused.set()
            return
        if self._dispatcher.dispatch(trainer_waits=self._wanted_at is not None):
            self._news_at = self._noticed_at = self._rollout.clock.now()  # an answer is awaited from now on

    async def _call_back(self) -> None:
        """Take samples back from the workers; what they had is in the reports that follow."""
        self._dispatcher.call_back_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rollout.timeouts.stop_s):
                while self._in_flight.running:
                    await self._digest(await self._letters())

    def _count_wait(self, since_s: float) -> None:
        """The reserved side has nothing to do while the consumer waits and the window is over."""
        now_s, idle_since_s = self._rollout.clock.now(), self._dispatcher.seeded_until_s
        self.waited_s += now_s - since_s
        if idle_since_s is not None:
            self.idle_s += max(0.0, now_s - max(since_s, idle_since_s))

    def _start_scoring(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._start(self._score(sample))

    def _recall(self, samples: Sequence[Sample]) -> None:
        """Samples whose rewards the journal has may be learned from, once the reference has read them again."""
        reading = self._rollout.reading
        if reading is None or reading.reference is None:
            self._release(samples)
            return
        for sample in samples:
            self._start(self._read_again(sample, reading))

    def _start(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        self.scoring.add(task)
        task.add_done_callback(self.scoring.discard)

    def _release(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.scored_s = self._rollout.clock.now()
            self._scored.put_nowait((sample, sample.attempt))

    def _trajectory(self, sample: Sample) -> Trajectory:
        if sample.judged is None:  # it is asked for twice: to be judged, and to be learned from
            sample.judged = sample.trajectory(self._rollout.codec.decode(view_tokens(sample.token_ids)))
        return sample.judged
