"""Frozen models receive growing samples and score finished ones, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.engine import FakeFrozenScorer
from tests.doubles.samples import make_delta, make_id, make_in_flight
from tests.doubles.session import Session, small_spec
from tests.virtual_time import run_virtual
from tidemill.controller.frozen_scoring import FrozenScoring
from tidemill.core.errors import ScorerLost
from tidemill.core.records import (
    ModelScores,
    NewTokens,
    Segment,
    TokenDelta,
    Trajectory,
    count,
    pack_logprobs,
    pack_tokens,
)


def run(spec: Any = None, **settings: Any) -> Session:
    async def main() -> Session:
        session = Session(spec=spec or small_spec(), frozen_scorer=FakeFrozenScorer(), **settings)
        session.result = await session.run()
        return session

    return run_virtual(main())


def learned_from(session: Session) -> list[Any]:
    """Each sample as the trainer received it: identity and tokens first, reference logprobs last."""
    groups: list[Any] = [group for batch in session.trainer.state.history for group in batch]
    return [sample for group in groups for sample in group[2]]


def test_new_tokens_are_sent_in_whole_chunks_and_the_prompt_at_once() -> None:
    in_flight, model = make_in_flight(), FakeFrozenScorer()
    scoring = FrozenScoring([model], reference=None, chunk_tokens=4)
    in_flight.assign("lease", [in_flight[make_id()]])

    def tell(*deltas: TokenDelta) -> list[NewTokens]:
        model.received.clear()
        for delta in deltas:
            in_flight.apply(delta)
        changed = (in_flight.get(delta.sample_id) for delta in deltas)
        scoring.tokens_added([sample for sample in changed if sample is not None])
        return list(model.received)

    def added(start: int, tokens: list[int]) -> NewTokens:
        return NewTokens(sample_id=make_id(), prompt_tokens=2, start=start, token_ids=pack_tokens(tokens))

    prompt = list(b"p0")  # 2 tokens
    assert tell(make_delta(tokens=[5, 6, 7])) == [added(0, prompt)]
    assert tell(make_delta(start=3, tokens=[8, 9]), make_delta(start=5, tokens=[10])) == [added(2, [5, 6, 7, 8])]
    assert tell(make_delta(start=6, tokens=[11])) == []
    assert tell(make_delta(sample_id=make_id("nobody"))) == []
    # The last chunk is not sent: the finished sample is scored as a whole.
    assert tell(make_delta(start=7, tokens=[12], finish="stop")) == []


def test_a_restarted_sample_is_sent_from_its_start() -> None:
    in_flight, model = make_in_flight(), FakeFrozenScorer()
    scoring, sample = FrozenScoring([model], reference=None, chunk_tokens=4), in_flight[make_id()]
    in_flight.assign("lease", [sample])
    in_flight.apply(make_delta(tokens=[1, 2, 3, 4]))
    scoring.tokens_added([sample])
    in_flight.restart([sample])
    scoring.forget([sample, in_flight[make_id(index=1)]])
    assert model.forgotten == [make_id()]  # nothing was sent of the other one
    in_flight.assign("lease", [sample])
    in_flight.apply(make_delta(attempt=2, tokens=[9, 9, 9, 9]))
    scoring.tokens_added([sample])
    assert [(added.start, count(added.token_ids)) for added in model.received] == [(0, 6), (0, 6)]


def test_a_migrated_sample_is_sent_without_a_gap() -> None:
    in_flight, model = make_in_flight(), FakeFrozenScorer()
    scoring, sample = FrozenScoring([model], reference=None, chunk_tokens=4), in_flight[make_id()]
    in_flight.assign("lease", [sample])
    in_flight.apply(make_delta(tokens=[1, 2, 3, 4, 5]))
    scoring.tokens_added([sample])
    in_flight.revoke("lease")
    in_flight.assign("other", [sample])
    stale = make_delta(start=5, tokens=[0, 0, 0])
    delta = make_delta(lease_id="other", attempt=2, start=5, tokens=[6, 7, 8])
    assert in_flight.apply(stale) is None
    in_flight.apply(delta)
    scoring.tokens_added([sample])
    assert [(added.start, count(added.token_ids)) for added in model.received] == [(0, 6), (6, 4)]
    assert model.received[1].token_ids == pack_tokens([5, 6, 7, 8])
    assert not model.forgotten


async def test_only_trained_tokens_have_reference_logprobs() -> None:
    class Counting(FakeFrozenScorer):
        async def score(self, *_: Any) -> ModelScores:
            return ModelScores(values=pack_logprobs([1.0, 2.0, 3.0, 4.0, 5.0]))

    trajectory = Trajectory(
        sample_id=make_id(),
        token_ids=pack_tokens(range(7)),
        segments=(
            Segment(role="prompt", start=0, end=2, trained=False),
            Segment(role="action", start=2, end=4, trained=True),
            Segment(role="observation", start=4, end=6, trained=False),
            Segment(role="action", start=6, end=7, trained=True),
        ),
        rollout_logprobs=pack_logprobs([0.0] * 3),
        versions=(),
        finish="stop",
    )
    scoring = FrozenScoring([], reference=Counting(), chunk_tokens=4)
    assert await scoring.ref_logprobs(trajectory) == pack_logprobs([1.0, 2.0, 5.0])
    assert await FrozenScoring([], reference=None, chunk_tokens=4).ref_logprobs(trajectory) == b""


def test_every_sample_is_scored_once_and_the_trainer_gets_the_logprobs() -> None:
    session = run()
    model = session.frozen_scorer
    assert model is not None
    assert len(set(model.scored)) == len(model.scored) == 4 * 6
    assert not model.known  # every sample that was sent has been scored
    assert max(added.start for added in model.received) > 0
    learned = learned_from(session)
    assert len(learned) == 4 * 6
    assert all(len(sample[-1]) == 4 * len(sample[1]) for sample in learned)
    figures = session.telemetry.steps[1].values
    assert (figures["tokens_read_ahead"], figures["tokens_read_late"]) == (3.0, 5.0)


@pytest.mark.parametrize("unfinished", ["continue", "restart", "finish"])
def test_samples_in_flight_at_a_publish_are_sent_without_a_gap(unfinished: str) -> None:
    spec = small_spec(schedule={"max_policy_lag": 2, "unfinished": unfinished}, trainer={"steps": 8})
    session = run(spec, slots=2)
    model = session.frozen_scorer
    assert model is not None
    assert bool(model.forgotten) == (unfinished == "restart")
    learned = learned_from(session)
    assert all(sample[-1] for sample in learned if sample[1])


def test_a_resumed_run_trains_on_the_same_reference_logprobs() -> None:
    whole = run()

    async def main(cut: int) -> Session:
        broken = Session(frozen_scorer=FakeFrozenScorer(), power_cut_after=cut)
        assert await broken.run_until_power_cut() is None
        session = Session(disk=broken.disk, frozen_scorer=FakeFrozenScorer())
        await session.run()
        return session

    again = 0
    for eighth in range(1, 8):
        session = run_virtual(main(whole.journal.written * eighth // 8))
        assert session.trainer.state == whole.trainer.state
        assert session.frozen_scorer is not None
        again += len(set(session.frozen_scorer.scored) - set(session.engine.submitted))
    assert again > 0  # samples whose tokens and rewards were restored, but not their reference logprobs


def test_a_lost_reference_ends_the_run() -> None:
    model = FakeFrozenScorer()
    model.failure = ScorerLost("the reference died three times")
    with pytest.raises(ScorerLost, match="died three times"):
        run_virtual(Session(frozen_scorer=model).run())
