"""Reading ahead: readers receive growing samples and read finished ones, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.engine import FakeReader
from tests.doubles.samples import make_delta, make_id, make_in_flight
from tests.doubles.session import Session, small_spec
from tests.virtual_time import run_virtual
from tidemill.controller.reading import Reading
from tidemill.core.errors import ReaderLost
from tidemill.core.records import Growth, Read, Segment, TokenDelta, Trajectory, count, pack_logprobs, pack_tokens


def run(spec: Any = None, **settings: Any) -> Session:
    async def main() -> Session:
        session = Session(spec=spec or small_spec(), reader=FakeReader(), **settings)
        session.result = await session.run()
        return session

    return run_virtual(main())


def learned_from(session: Session) -> list[Any]:
    """Each sample as the trainer received it: identity and tokens first, reference logprobs last."""
    groups: list[Any] = [group for batch in session.trainer.state.history for group in batch]
    return [sample for group in groups for sample in group[2]]


def test_growth_is_sent_in_whole_chunks_and_the_prompt_at_once() -> None:
    in_flight, reader = make_in_flight(), FakeReader()
    reading = Reading([reader], reference=None, chunk_tokens=4)
    in_flight.assign("lease", [in_flight[make_id()]])

    def tell(*deltas: TokenDelta) -> list[Growth]:
        reader.growths.clear()
        for delta in deltas:
            in_flight.apply(delta)
        grown = (in_flight.get(delta.sample_id) for delta in deltas)
        reading.grown([sample for sample in grown if sample is not None])
        return list(reader.growths)

    def growth(start: int, tokens: list[int]) -> Growth:
        return Growth(sample_id=make_id(), prompt_tokens=2, start=start, token_ids=pack_tokens(tokens))

    prompt = list(b"p0")  # 2 tokens
    assert tell(make_delta(tokens=[5, 6, 7])) == [growth(0, prompt)]
    assert tell(make_delta(start=3, tokens=[8, 9]), make_delta(start=5, tokens=[10])) == [growth(2, [5, 6, 7, 8])]
    assert tell(make_delta(start=6, tokens=[11])) == []
    assert tell(make_delta(sample_id=make_id("nobody"))) == []
    # The last chunk is not sent: the finished sample is read as a whole.
    assert tell(make_delta(start=7, tokens=[12], finish="stop")) == []


def test_a_restarted_sample_is_sent_from_its_start() -> None:
    in_flight, reader = make_in_flight(), FakeReader()
    reading, sample = Reading([reader], reference=None, chunk_tokens=4), in_flight[make_id()]
    in_flight.assign("lease", [sample])
    in_flight.apply(make_delta(tokens=[1, 2, 3, 4]))
    reading.grown([sample])
    in_flight.restart([sample])
    reading.forget([sample, in_flight[make_id(index=1)]])
    assert reader.forgotten == [make_id()]  # nothing was sent of the other one
    in_flight.assign("lease", [sample])
    in_flight.apply(make_delta(attempt=2, tokens=[9, 9, 9, 9]))
    reading.grown([sample])
    assert [(growth.start, count(growth.token_ids)) for growth in reader.growths] == [(0, 6), (0, 6)]


def test_a_migrated_sample_is_sent_without_a_gap() -> None:
    in_flight, reader = make_in_flight(), FakeReader()
    reading, sample = Reading([reader], reference=None, chunk_tokens=4), in_flight[make_id()]
    in_flight.assign("lease", [sample])
    in_flight.apply(make_delta(tokens=[1, 2, 3, 4, 5]))
    reading.grown([sample])
    in_flight.revoke("lease")
    in_flight.assign("other", [sample])
    stale = make_delta(start=5, tokens=[0, 0, 0])
    delta = make_delta(lease_id="other", attempt=2, start=5, tokens=[6, 7, 8])
    assert in_flight.apply(stale) is None
    in_flight.apply(delta)
    reading.grown([sample])
    assert [(growth.start, count(growth.token_ids)) for growth in reader.growths] == [(0, 6), (6, 4)]
    assert reader.growths[1].token_ids == pack_tokens([5, 6, 7, 8])
    assert not reader.forgotten


async def test_only_trained_tokens_have_reference_logprobs() -> None:
    class Counting(FakeReader):
        async def read(self, *_: Any) -> Read:
            return Read(values=pack_logprobs([1.0, 2.0, 3.0, 4.0, 5.0]))

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
    reading = Reading([], reference=Counting(), chunk_tokens=4)
    assert await reading.ref_logprobs(trajectory) == pack_logprobs([1.0, 2.0, 5.0])
    assert await Reading([], reference=None, chunk_tokens=4).ref_logprobs(trajectory) == b""


def test_every_sample_is_read_once_and_the_trainer_gets_the_logprobs() -> None:
    session = run()
    reader = session.reader
    assert reader is not None
    assert len(set(reader.was_read)) == len(reader.was_read) == 4 * 6
    assert not reader.known  # every sample that was sent has been read
    assert max(growth.start for growth in reader.growths) > 0
    learned = learned_from(session)
    assert len(learned) == 4 * 6
    assert all(len(sample[-1]) == 4 * len(sample[1]) for sample in learned)
    figures = session.telemetry.steps[1].values
    assert (figures["tokens_read_ahead"], figures["tokens_read_late"]) == (3.0, 5.0)


@pytest.mark.parametrize("unfinished", ["continue", "restart", "finish"])
def test_samples_in_flight_at_a_publish_are_sent_without_a_gap(unfinished: str) -> None:
    spec = small_spec(schedule={"max_policy_lag": 2, "unfinished": unfinished}, trainer={"steps": 8})
    session = run(spec, slots=2)
    reader = session.reader
    assert reader is not None
    assert bool(reader.forgotten) == (unfinished == "restart")
    learned = learned_from(session)
    assert all(sample[-1] for sample in learned if sample[1])


def test_a_resumed_run_trains_on_the_same_reference_logprobs() -> None:
    whole = run()

    async def main(cut: int) -> Session:
        broken = Session(reader=FakeReader(), power_cut_after=cut)
        assert await broken.run_until_power_cut() is None
        session = Session(disk=broken.disk, reader=FakeReader())
        await session.run()
        return session

    again = 0
    for eighth in range(1, 8):
        session = run_virtual(main(whole.journal.written * eighth // 8))
        assert session.trainer.state == whole.trainer.state
        assert session.reader is not None
        again += len(set(session.reader.was_read) - set(session.engine.submitted))
    assert again > 0  # samples whose tokens and rewards were restored, but not their reference logprobs


def test_a_lost_reference_ends_the_run() -> None:
    reader = FakeReader()
    reader.failure = ReaderLost("the reference died three times")
    with pytest.raises(ReaderLost, match="died three times"):
        run_virtual(Session(reader=reader).run())
