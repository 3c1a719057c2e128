"""Tail batching: the same batches whatever happens to machines and controller, and every prompt as often. In virtual
time."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.environments import FakeEnvironments
from tests.doubles.session import Disk, PoolSession, Session, ended, granted, small_spec, trained
from tests.virtual_time import run_virtual
from tidemill.controller.batching import BatchBuilder
from tidemill.controller.collector import SampleCollector
from tidemill.controller.entries import RoundClosed, decode
from tidemill.controller.rounds import Rounds
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import DeadlineError

STEPS, GROUPS, SIZE = 7, 4, 2


def spec(schedule: dict[str, Any], *, redraw: bool = False, steps: int = STEPS, every: int = 2) -> Any:
    return small_spec(
        schedule={"tail": "batching", "oversample": 1.5, "nominal_slots": 4, **schedule},
        algorithm={"dynamic_sampling": redraw, "max_redraws": 1},
        trainer={"steps": steps},
        batch={"prompts": GROUPS, "group_size": SIZE},
        sampling={"max_new_tokens": 24},
        checkpoint={"every_steps": every},
        eval={"every_steps": 3},
    )


def run(configured: Any, *, disk: Disk | None = None, cut: int | None = None, **changes: Any) -> PoolSession:
    async def main() -> PoolSession:
        session = PoolSession(spec=configured, disk=disk or Disk(), power_cut_after=cut, **changes)
        session.result = await session.run_until_power_cut()
        return session

    return run_virtual(main())


@lru_cache
def undisturbed(**schedule: Any) -> PoolSession:
    redraw = schedule.pop("redraw", False)
    return run(spec(schedule, redraw=redraw), slots=3)


def rounds(session: Session) -> list[RoundClosed]:
    stored = [decode(blob) for _, blob in run_virtual(session.journal.load())]
    return [entry for entry in stored if isinstance(entry, RoundClosed)]


def prompts(session: Session) -> Counter[object]:
    """How often each prompt of an epoch was trained on."""
    history: Any = session.trainer.state.history
    return Counter((group[1], group[2][0][0].epoch) for batch in history for group in batch)


def planned(steps: int) -> Counter[object]:
    source = Session(spec=spec({})).source
    return Counter((prompt.prompt_id, epoch) for step in range(steps) for epoch, prompt in source.train_batch(step + 1))


@pytest.mark.parametrize("oversample", [1.0, 1.25, 1.5, 3.0])
@pytest.mark.parametrize("nominal_slots", [0, 4])
def test_every_prompt_is_trained_as_often_as_without_tail_batching(oversample: float, nominal_slots: int) -> None:
    session = undisturbed(oversample=oversample, nominal_slots=nominal_slots)
    assert session.result is not None and session.result.steps == STEPS
    assert prompts(session) == planned(STEPS)
    assert not rounds(session)[-1].returned


def test_a_short_round_trains_the_groups_whose_longest_sample_is_shortest() -> None:
    first = rounds(undisturbed(nominal_slots=0, oversample=1.5))[0]
    longest = [max(group.lengths) for group in first.trained]
    assert longest == sorted(longest)
    assert len(first.trained) == GROUPS and len(first.returned) == 2
    for group in first.returned:  # by then it had at least as many tokens as the last that was taken
        assert max(group.seen) == longest[-1]


def test_returned_prompts_come_back_in_the_next_short_round_or_in_a_long_one() -> None:
    closed = rounds(undisturbed(oversample=1.5))
    for earlier, later in pairwise(closed):
        started = {group.place for group in later.trained} | {group.place for group in later.returned}
        long = len(started) == GROUPS
        if not long:
            assert {group.place for group in earlier.returned if group.first_in_short} <= started
    assert any(len(each.trained) + len(each.returned) == GROUPS for each in closed)  # a long round


def test_a_prompt_without_signal_is_not_trained_on_even_if_an_earlier_round_returned_it() -> None:
    session = undisturbed(oversample=1.5, redraw=True)
    closed = rounds(session)
    redrawn = Counter(place for each in closed for place in each.redrawn)
    trained_on = Counter(group.place for each in closed for group in each.trained)
    returned = {group.place for each in closed for group in each.returned}

    assert redrawn.keys() & returned
    assert set((trained_on + redrawn).values()) == {1}
    assert trained_on.total() == STEPS * GROUPS


LIVES = st.lists(st.integers(50, 6000), max_size=3)
MACHINES = st.lists(st.tuples(st.floats(0, 15), st.floats(0.3, 8)), max_size=6)


@settings(max_examples=20)
@given(
    LIVES,
    MACHINES,
    st.integers(1, 9),
    st.fixed_dictionaries(
        {
            "oversample": st.sampled_from([1.25, 1.5, 2.0]),
            "nominal_slots": st.sampled_from([0, 3, 8]),
            "oversample_group": st.sampled_from([0, 0, 1, 2]),
            "redraw": st.booleans(),
        }
    ),
)
def test_evictions_kills_and_timing_do_not_change_what_is_trained(
    cuts: list[int], machines: list[tuple[float, float]], slots: int, schedule: dict[str, Any]
) -> None:
    expected = undisturbed(**schedule)
    events = [granted(str(at), start) for at, (start, _) in enumerate(machines)]
    events += [ended(str(at), start + lasts) for at, (start, lasts) in enumerate(machines)]
    given_spec = spec({name: value for name, value in schedule.items() if name != "redraw"}, redraw=schedule["redraw"])
    disk = Disk()
    for cut in [*cuts, None]:
        script = sorted(events, key=lambda event: event[0])
        session = run(given_spec, disk=disk, cut=cut, slots=slots, script=script)
    assert session.result is not None
    assert trained(session) == trained(expected)
    assert {step: each.positions for step, each in session.ledger.rounds.items()} == {
        step: each.positions for step, each in expected.ledger.rounds.items()
    }


def test_the_journal_names_what_each_round_trained_and_returned() -> None:
    session = undisturbed(oversample=1.5)
    closed = rounds(session)
    assert {each.step: each.positions for each in closed} == {
        step: each.positions for step, each in session.ledger.rounds.items()
    }
    assert [each.step for each in closed] == list(range(1, STEPS + 1))


def test_more_samples_than_a_group_needs_are_set_aside_and_the_shortest_are_trained() -> None:
    session = undisturbed(oversample_group=2, nominal_slots=0)
    history: Any = session.trainer.state.history
    assert all(len(group[2]) == SIZE for batch in history for group in batch)
    plain = undisturbed(nominal_slots=0)
    mean = [
        sum(sum(group.lengths) for each in rounds(one) for group in each.trained) / (STEPS * GROUPS * SIZE)
        for one in (session, plain)
    ]
    assert mean[0] < mean[1]  # the bias that its documentation names


def test_agents_are_ranked_by_their_tokens() -> None:
    configured = spec({})
    states = []
    for slots in (2, 7):

        async def main(slots: int = slots) -> Session:
            session = Session(spec=configured, slots=slots, environments=FakeEnvironments())
            session.result = await session.run()
            return session

        states.append(trained(run_virtual(main())))
    assert states[0] == states[1]


def test_a_round_does_not_wait_for_ever_for_an_engine_that_returns_nothing() -> None:
    async def main() -> None:
        session = Session(spec=spec({}), timeouts=Timeouts(worker_s=600))

        def keep(*_: object) -> list[object]:
            return []

        async def close(rounds: Rounds, batch: BatchBuilder, collector: SampleCollector) -> None:
            session.engine.abort = session.engine.poll = keep  # type: ignore[assignment]
            await right(rounds, batch, collector)

        with pytest.MonkeyPatch.context() as patched:
            right = Rounds.close
            patched.setattr(Rounds, "close", close)
            with pytest.raises(DeadlineError, match="samples to be handed back"):
                await session.run()
        assert session.telemetry.named("waiting")

    run_virtual(main())
