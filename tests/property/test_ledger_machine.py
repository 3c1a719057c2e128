"""Under any faults of workers, messages and power no accepted token is lost and no sample is trained on twice."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.doubles.journal import MemoryJournal, PowerCut
from tests.doubles.samples import GROUPS, V3, completion, logprob, make_plan, make_prompts, make_report, prompt_of
from tidemill.controller.batching import GroupAssembly, scored
from tidemill.controller.in_flight import InFlight
from tidemill.controller.ledger import Ledger
from tidemill.controller.samples import SampleState
from tidemill.core.records import (
    Finish,
    GenerateRequest,
    Reward,
    SampleId,
    TokenDelta,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)

T = TypeVar("T")
LIMIT = 8


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


class Attempt:
    """A worker's view of one request; it gets no acknowledgements."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request, self.at, self.over = request, len(request.prefix_ids) // 4, False

    def say(self, length: int, cut: Finish | None) -> TokenDelta:
        tokens, ending = completion(self.request.sample_id, V3, LIMIT)
        end = min(self.at + length, len(tokens))
        finish: Finish | None = ending if end == len(tokens) else cut
        start, self.at, self.over = self.at, end, finish is not None
        return TokenDelta(
            sample_id=self.request.sample_id,
            lease_id=self.request.lease_id,
            attempt=self.request.attempt,
            start=start,
            token_ids=pack_tokens(tokens[start:end]),
            logprobs=pack_logprobs(map(logprob, tokens[start:end])),
            version=V3,
            finish=finish,
        )


class LedgerMachine(RuleBasedStateMachine):
    """Messages are delivered in any order, any number of times, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = MemoryJournal()
        self.attempts: list[Attempt] = []
        self.bag: list[TokenDelta] = []
        self.leases = 0
        self.accepted: dict[SampleId, int] = {}  # tokens whose journal append returned
        self.rewarded: set[SampleId] = set()
        self._start()

    def _start(self) -> None:
        self.ledger = Ledger(self.journal, round_size=3)
        self.batch = InFlight(make_plan(), version_number=3)
        now(self.ledger.load(self.batch, prompt_of, after_step=3))
        if not self.batch.groups:
            now(self.ledger.open(self.batch, GROUPS, make_prompts()))
        self.assembly = GroupAssembly(2)
        self.learned: list[SampleId] = []  # by the trainer, whose gradients die with the process
        for sample in self.batch.in_state(SampleState.SCORED):
            self._learn(sample.sample_id)

    def _learn(self, sample_id: SampleId) -> None:
        sample = self.batch[sample_id]
        assert sample.reward is not None
        position = sample.ordinal // 2
        if self.assembly.add(position, scored(sample.trajectory(lambda _: ""), sample.reward, truncated="trained")):
            self.learned += [trajectory.sample_id for trajectory in self.assembly.complete.pop(position)]

    def _restart(self) -> None:
        self.journal = MemoryJournal(self.journal.disk)
        self._start()

    @rule()
    def assign(self) -> None:
        self.leases += 1
        self.attempts += map(Attempt, self.batch.assign(f"lease {self.leases}"))

    @precondition(lambda self: self.batch.waiting)
    @rule(data=st.data())
    def assign_some(self, data: st.DataObject) -> None:
        """Different workers get different samples."""
        ordinals = data.draw(st.lists(st.sampled_from(sorted(self.batch.waiting)), unique=True, min_size=1))
        self.leases += 1
        samples = [self.batch.samples[ordinal] for ordinal in ordinals]
        self.attempts += map(Attempt, self.batch.assign(f"lease {self.leases}", samples))

    @precondition(lambda self: self.batch.leases)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A lease ends; its worker still sends messages."""
        lease_id = data.draw(st.sampled_from(self.batch.leases))
        for sample in self.batch.revoke(lease_id):
            assert sample.state is SampleState.WAITING
        assert not self.batch.held(lease_id)

    @precondition(lambda self: any(not attempt.over for attempt in self.attempts))
    @rule(data=st.data(), length=st.integers(0, 4), cut=st.sampled_from([None, None, None, "aborted", "error"]))
    def speak(self, data: st.DataObject, length: int, cut: Finish | None) -> None:
        attempt = data.draw(st.sampled_from([attempt for attempt in self.attempts if not attempt.over]))
        self.bag.append(attempt.say(length, cut))

    @precondition(lambda self: self.bag)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        deltas = data.draw(st.lists(st.sampled_from(self.bag), max_size=4))
        reports = [make_report(*deltas[:2]), make_report(*deltas[2:])]
        finished = now(self.ledger.accept(self.batch, reports))
        assert len({sample.sample_id for sample in finished}) == len(finished)
        assert all(sample.state is SampleState.FINISHED for sample in finished)
        self.accepted = {sample.sample_id: sample.length for sample in self.batch}

    @precondition(lambda self: self.batch.in_state(SampleState.FINISHED))
    @rule(data=st.data())
    def reward(self, data: st.DataObject) -> None:
        sample = data.draw(st.sampled_from(self.batch.in_state(SampleState.FINISHED)))
        now(self.ledger.record_rewards(self.batch, [(sample, Reward(value=1.0))]))
        self.rewarded.add(sample.sample_id)
        self._learn(sample.sample_id)

    @rule()
    def kill(self) -> None:
        self._restart()

    @precondition(lambda self: self.bag)
    @rule(data=st.data(), size=st.integers(0, 200))
    def kill_while_writing(self, data: st.DataObject, size: int) -> None:
        deltas = data.draw(st.lists(st.sampled_from(self.bag), min_size=1, max_size=4))
        self.journal = MemoryJournal(self.journal.disk, power_cut_after=size)
        self.ledger._journal = self.journal
        try:
            now(self.ledger.accept(self.batch, [make_report(delta) for delta in deltas]))
        except PowerCut:
            self._restart()
        else:  # nothing was applied, or it fit
            self.accepted = {sample.sample_id: sample.length for sample in self.batch}
            self.journal = self.ledger._journal = MemoryJournal(self.journal.disk)

    @invariant()
    def tokens_are_the_ones_that_were_said(self) -> None:
        for sample in self.batch:
            tokens, ending = completion(sample.sample_id, V3, LIMIT)
            assert unpack_tokens(bytes(sample.token_ids)) == tokens[: sample.length]
            assert sample.logprobs == pack_logprobs(map(logprob, tokens[: sample.length]))
            assert [(run.start, run.end) for run in sample.versions] == ([(0, sample.length)] if sample.length else [])
            if sample.state in (SampleState.FINISHED, SampleState.SCORED):
                assert (sample.length, sample.finish) == (len(tokens), ending)

    @invariant()
    def the_index_is_true(self) -> None:
        batch = self.batch
        assert sorted(batch.waiting) == [sample.ordinal for sample in batch.in_state(SampleState.WAITING)]
        held = sorted(ordinal for lease_id in batch.leases for ordinal in batch.held(lease_id))
        assert held == [sample.ordinal for sample in batch.in_state(SampleState.RUNNING)]

    @invariant()
    def nothing_accepted_is_lost(self) -> None:
        for sample_id, length in self.accepted.items():
            assert self.batch[sample_id].length >= length
        for sample_id in self.rewarded:
            assert self.batch[sample_id].state is SampleState.SCORED

    @invariant()
    def nothing_is_learned_twice(self) -> None:
        assert len(set(self.learned)) == len(self.learned)
        scored_now = {sample.sample_id for sample in self.batch.in_state(SampleState.SCORED)}
        assert set(self.learned) <= scored_now
        if self.batch.all_scored:
            assert len(self.learned) == len(self.batch.samples)

    @invariant()
    def counts_agree(self) -> None:
        states = [sample.state for sample in self.batch]
        assert self.batch.running == states.count(SampleState.RUNNING)
        assert self.batch.unfinished == self.batch.running + states.count(SampleState.WAITING)
        assert self.batch.scored == states.count(SampleState.SCORED)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=60)
