"""Collecting: scoring one by one, retries, deadlines and stopping, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from tests.doubles.engine import FakeCompute, FakeEngine
from tests.doubles.journal import MemoryJournal
from tests.doubles.samples import GROUPS, FakeCodec, make_plan, make_prompts, prompt_of
from tests.doubles.session import FakeScorer, FakeTelemetry
from tests.virtual_time import run_virtual
from tidemill.controller.collector import SampleCollector, collect_samples
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import InFlight
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext, StopRequested
from tidemill.controller.samples import SampleState
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import DeadlineError, TidemillError
from tidemill.core.protocols import LoopClock, Scorer
from tidemill.core.records import PolicyVersion, Prompt, Reward, TokenDelta, Trajectory
from tidemill.rollout.worker import EngineWorker

TIMEOUTS = Timeouts(notice_s=10.0, worker_s=60.0, scorer_s=40.0, stop_s=5.0)


@dataclass
class Stage:
    """A batch of six samples to collect."""

    engine: FakeEngine = field(default_factory=lambda: FakeEngine(PolicyVersion(number=3, digest="a")))
    scorer: Scorer = field(default_factory=FakeScorer)
    telemetry: FakeTelemetry = field(default_factory=FakeTelemetry)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    batch: InFlight = field(init=False)
    got: list[Trajectory] = field(default_factory=list)

    async def collect(self, each: Callable[[SampleCollector], Awaitable[None]] | None = None) -> SampleCollector:
        ledger = Ledger(self.journal, round_size=3)
        self.batch = InFlight(make_plan(), version_number=3)
        await ledger.load(self.batch, prompt_of, after_step=3)
        if not self.batch.groups:
            await ledger.open(self.batch, GROUPS, make_prompts())
        worker = EngineWorker(self.engine, FakeCompute(0.1), clock=LoopClock(), tick_s=0.1)
        fleet = Fleet(worker, slots=3, clock=LoopClock(), telemetry=self.telemetry, timeouts=TIMEOUTS)
        rollout = RolloutContext(
            fleet=fleet,
            ledger=ledger,
            scorer=self.scorer,
            codec=FakeCodec(),
            telemetry=self.telemetry,
            clock=LoopClock(),
            stop=self.stop,
            timeouts=TIMEOUTS,
        )
        try:
            async with fleet, collect_samples(self.batch, rollout) as collection:
                async for trajectory in collection:
                    self.got.append(trajectory)
                    if each:
                        await each(collection)
            return collection
        finally:
            await worker.close()


class SlowScorer(FakeScorer):
    """Records the arrival time of each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.asked_at = seconds, list[float]()

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        self.asked_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.seconds)
        return Reward(value=1.0)


def test_every_sample_arrives_once_scored_and_decoded() -> None:
    stage = Stage()

    run_virtual(stage.collect())

    assert {t.sample_id for t in stage.got} == {sample.sample_id for sample in stage.batch}
    assert len(stage.got) == 6
    assert all(t.reward is not None and t.text for t in stage.got)
    assert stage.telemetry.progressed[0] == ("rollout", 0, 6)
    assert stage.telemetry.progressed[-1] == ("rollout", 6, 6)
    assert all(0 < sample.finished_s <= sample.scored_s for sample in stage.batch)


def test_a_sample_is_scored_while_others_are_generated() -> None:
    scorer = SlowScorer(0.05)
    stage = Stage(scorer=scorer)

    run_virtual(stage.collect())

    assert len(set(scorer.asked_at)) > 1
    assert min(scorer.asked_at) < max(sample.finished_s for sample in stage.batch)
    assert all(sample.scored_s - sample.finished_s == pytest.approx(0.05) for sample in stage.batch)


def test_a_slow_consumer_stops_neither_generating_nor_scoring() -> None:
    stage = Stage()

    async def dawdle(_: SampleCollector) -> None:
        await asyncio.sleep(1000.0)  # longer than every deadline

    run_virtual(stage.collect(dawdle))

    assert len(stage.got) == 6
    assert max(sample.finished_s for sample in stage.batch) < 10.0
    assert stage.telemetry.named("waiting") == []


class NappingEngine(FakeEngine):
    """Generates no tokens from its third poll until `wake_at`."""

    polls = 0
    wake_at = 500.0

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        self.polls += 1
        asleep = self.polls > 3 and asyncio.get_running_loop().time() < self.wake_at
        return [] if asleep else super().poll(deadline_s)


def test_no_deadline_applies_while_the_consumer_is_busy() -> None:
    """The trainer may be using the engine's thread."""
    stage = Stage(engine=NappingEngine(PolicyVersion(number=3, digest="a")))

    async def train_for_long(_: SampleCollector) -> None:
        await asyncio.sleep(480.0 if len(stage.got) == 1 else 0.0)

    run_virtual(stage.collect(train_for_long))

    assert len(stage.got) == 6
    # the consumer waited only for the last 20 s, with an event every 10 s
    assert len(stage.telemetry.named("waiting")) <= 2


class StumblingEngine(FakeEngine):
    """Fails at its second poll for some samples, `times` times each."""

    def __init__(self, times: int, how: str) -> None:
        super().__init__(PolicyVersion(number=3, digest="a"))
        self.times, self.how, self.stumbled = times, how, 0

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        deltas = super().poll(deadline_s)
        if self.stumbled >= self.times or not deltas or deltas[0].start == 0:
            return deltas
        self.stumbled += 1
        return [self._stumble(deltas[0]), *deltas[1:]]

    def _stumble(self, delta: TokenDelta) -> TokenDelta:
        if self.how == "error":
            self.jobs.pop(delta.sample_id, None)
            return msgspec.structs.replace(delta, token_ids=b"", logprobs=b"", finish="error", error="out of memory")
        if self.how == "refused":
            self.jobs.pop(delta.sample_id, None)
            return msgspec.structs.replace(delta, token_ids=b"", logprobs=b"", finish="aborted", error="wrong version")
        if self.how == "called back":
            self.jobs.pop(delta.sample_id, None)
            return msgspec.structs.replace(delta, token_ids=b"", logprobs=b"", finish="aborted")
        return msgspec.structs.replace(delta, start=delta.start + 1)  # a gap, after which the engine continues


@pytest.mark.parametrize(("how", "failures"), [("error", 2), ("refused", 2), ("gap", 2), ("called back", 0)])
def test_a_failed_sample_continues_from_its_tokens(how: str, failures: int) -> None:
    stage, quiet = Stage(engine=StumblingEngine(2, how)), Stage()

    run_virtual(stage.collect())
    run_virtual(quiet.collect())

    assert sum(sample.failures for sample in stage.batch) == failures
    assert max(sample.attempt for sample in stage.batch) > 1
    assert {(t.sample_id, t.token_ids) for t in stage.got} == {(t.sample_id, t.token_ids) for t in quiet.got}


def test_a_sample_that_always_fails_ends_the_run() -> None:
    stage = Stage(engine=StumblingEngine(10**6, "error"))

    with pytest.raises(TidemillError, match=r"3 attempts to generate .* failed; last error: out of memory"):
        run_virtual(stage.collect())


def test_an_engine_error_is_raised_and_earlier_tokens_are_kept() -> None:
    stage = Stage()
    polls = 0

    def break_down() -> None:
        nonlocal polls
        polls += 1
        if polls == 4:
            raise ValueError("engine on fire")

    stage.engine.on_poll = break_down

    with pytest.raises(ValueError, match="engine on fire"):
        run_virtual(stage.collect())

    # three polls of three slots with two tokens each, or one if the sample ended
    assert 15 <= stage.batch.counters.tokens_accepted <= 18
    again = Stage(journal=MemoryJournal(stage.journal.disk))
    run_virtual(again.collect())
    assert sum(sample.recovered for sample in again.batch) == stage.batch.counters.tokens_accepted


class FailingScorer(FakeScorer):
    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        raise LookupError("a bug in the scorer")


def test_a_scorer_error_is_raised() -> None:
    with pytest.raises(LookupError, match="a bug in the scorer"):
        run_virtual(Stage(scorer=FailingScorer()).collect())


class SilentEngine(FakeEngine):
    """Generates no tokens; its worker sends heartbeats."""

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        return []


def test_an_engine_without_tokens_meets_a_deadline_after_waiting_events() -> None:
    stage = Stage(engine=SilentEngine(PolicyVersion(number=3, digest="a")))

    with pytest.raises(DeadlineError) as caught:
        run_virtual(stage.collect())
    assert caught.value.waited_s == pytest.approx(60.0, abs=1.0)
    assert caught.value.awaited == "tokens of 6 samples of step 3 (train)"
    assert "the worker" in caught.value.look_at

    # an event every 10 s (heartbeats come every 0.1 s); at 60 s the wait fails
    assert [round(fields["waited_s"] / 10) for fields in stage.telemetry.named("waiting")] == [1, 2, 3, 4, 5]


def test_an_engine_that_hangs_in_its_poll_meets_the_same_deadline() -> None:
    stage = Stage()
    stage.engine.slots = 0  # nothing runs, so that no poll returns tokens

    with pytest.raises(DeadlineError, match="tokens of 6 samples"):
        run_virtual(stage.collect())


def test_a_scorer_that_hangs_meets_its_own_deadline() -> None:
    with pytest.raises(DeadlineError, match="rewards of 6 samples of step 3") as caught:
        run_virtual(Stage(scorer=SlowScorer(10**6)).collect())
    assert caught.value.waited_s == pytest.approx(40.0, abs=1.0)
    assert "[scoring]" in caught.value.look_at


def test_stopping_aborts_and_journals_samples_in_flight() -> None:
    stage = Stage()

    async def stop_soon() -> None:
        asyncio.get_running_loop().call_later(0.35, stage.stop.set)
        await stage.collect()

    with pytest.raises(StopRequested):
        run_virtual(stop_soon())

    assert stage.engine.jobs == {}
    assert stage.batch.running == 0
    assert stage.batch.counters.tokens_accepted == stage.engine.generated > 0
    again = Stage(journal=MemoryJournal(stage.journal.disk))
    run_virtual(again.collect())
    assert sum(sample.recovered for sample in again.batch) == stage.engine.generated
    assert {t.sample_id for t in again.got} == {sample.sample_id for sample in again.batch}


class DeafEngine(FakeEngine):
    """Drops aborted samples without a last delta."""

    def abort(self, sample_ids: object) -> list[TokenDelta]:
        return []

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        return super().poll(deadline_s) if self.generated < 4 else []


def test_stopping_waits_a_limited_time_for_the_engine() -> None:
    stage = Stage(engine=DeafEngine(PolicyVersion(number=3, digest="a")))
    ended = 0.0

    async def stop_soon() -> None:
        nonlocal ended
        asyncio.get_running_loop().call_later(1.0, stage.stop.set)
        try:
            await stage.collect()
        finally:
            ended = asyncio.get_running_loop().time()

    with pytest.raises(StopRequested):
        run_virtual(stop_soon())

    assert 6.0 <= ended < 7.0  # stopped at 1 s, with stop_s = 5
    assert stage.batch.in_state(SampleState.RUNNING)
