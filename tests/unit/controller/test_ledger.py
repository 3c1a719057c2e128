"""The ledger: what is journalled, and what a resume restores from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.doubles.journal import MemoryJournal
from tests.doubles.samples import (
    FIRST,
    GROUPS,
    V3,
    make_delta,
    make_id,
    make_plan,
    make_prompt,
    make_prompts,
    make_report,
    prompt_of,
)
from tests.fabricated_run import make_prompt as fabricated_prompt
from tests.fabricated_run import make_trajectory
from tidemill.controller.entries import NEVER_PRUNED, EvalResult, Published, encode
from tidemill.controller.in_flight import InFlight, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.samples import SampleState
from tidemill.core.errors import UserError
from tidemill.core.evidence import Evidence
from tidemill.core.records import (
    PolicyVersion,
    Reward,
    SourceRun,
    TokenDelta,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)

GOOD = Reward(value=1.0, components={"exact": 1.0})
FOLLOWING = [make_id("p0", 0), make_id("p0", 1), make_id("p1", 0)]


async def loaded(journal: MemoryJournal, *, after_step: int = 3, **plan: Any) -> tuple[Ledger, InFlight, int]:
    """A new process: the ledger, the samples in flight, and the number of batches after the checkpoint."""
    ledger, in_flight = Ledger(journal, round_size=3), InFlight(make_plan(**plan), version_number=after_step)
    return ledger, in_flight, await ledger.load(in_flight, prompt_of, after_step=after_step)


async def opened(journal: MemoryJournal, *, after_step: int = 3) -> tuple[Ledger, InFlight]:
    ledger, in_flight, _ = await loaded(journal, after_step=after_step)
    if not in_flight.groups:
        await ledger.open(in_flight, GROUPS, make_prompts())
    return ledger, in_flight


async def restarted(journal: MemoryJournal, **where: int) -> tuple[Ledger, InFlight]:
    return await opened(MemoryJournal(journal.disk), **where)


async def generate(ledger: Ledger, batch: InFlight, deltas: Sequence[TokenDelta]) -> list[int]:
    batch.assign("lease")
    return [sample.ordinal - FIRST for sample in await ledger.accept(batch, [make_report(*deltas)])]


async def one_of_each(journal: MemoryJournal) -> InFlight:
    """Sample 0 is scored, 1 finished, 2 has two tokens, the others none."""
    ledger, batch = await opened(journal)
    first, second, third = FOLLOWING
    finished = await generate(
        ledger,
        batch,
        [
            make_delta(sample_id=first, tokens=[7], finish="stop"),
            make_delta(sample_id=second, tokens=[8], finish="length"),
            make_delta(sample_id=third, tokens=[9, 10]),
        ],
    )
    assert finished == [0, 1]
    await ledger.record_rewards(batch, [(batch[first], GOOD)])
    return batch


async def test_a_resume_restores_every_sample() -> None:
    journal = MemoryJournal()
    before = await one_of_each(journal)

    _, batch = await restarted(journal)

    assert [sample.state.value for sample in batch] == ["scored", "finished", *["waiting"] * 4]
    assert [unpack_tokens(bytes(sample.token_ids)) for sample in list(batch)[:4]] == [[7], [8], [9, 10], []]
    assert next(iter(batch)).reward == GOOD
    assert [s.logprobs for s in batch] == [s.logprobs for s in before]
    assert [s.versions for s in batch] == [s.versions for s in before]
    assert [s.finish for s in list(batch)[:3]] == ["stop", "length", None]
    assert (sum(s.recovered for s in batch), batch.counters.tokens_accepted, batch.unfinished, batch.scored) == (
        4,
        0,
        4,
        1,
    )


async def test_a_partial_sample_continues_in_a_new_attempt() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger, batch = await restarted(journal)

    request = batch.assign("new lease")[0]

    assert (request.sample_id, request.attempt, request.prefix_ids) == (FOLLOWING[2], 2, pack_tokens([9, 10]))
    late = make_delta(sample_id=FOLLOWING[2], start=2, attempt=1)
    assert await ledger.accept(batch, [make_report(late)]) == []
    assert dict(batch.counters.ignored) == {"stale_lease": 1}


async def test_two_deltas_of_a_sample_in_one_report_finish_it_once() -> None:
    ledger, batch = await opened(MemoryJournal())

    finished = await generate(ledger, batch, [make_delta(), make_delta(start=2, tokens=[3], finish="stop")])

    assert finished == [0]


async def test_reports_that_arrive_together_are_all_journalled() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    batch.assign("lease")
    reports = [make_report(make_delta(sample_id=sample_id, finish="stop")) for sample_id in FOLLOWING]

    assert len(await ledger.accept(batch, reports)) == 3

    _, again = await restarted(journal)
    assert [sample.state.value for sample in again] == ["finished"] * 3 + ["waiting"] * 3


async def test_a_report_without_tokens_is_not_journalled() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    appends = journal.appends

    await generate(ledger, batch, [make_delta(lease_id="stale"), make_delta(tokens=[])])
    await ledger.record_rewards(batch, [])

    assert journal.appends == appends


async def test_tokens_of_an_aborted_sample_are_journalled() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    await generate(ledger, batch, [make_delta(finish="aborted")])

    _, batch = await restarted(journal)

    assert (next(iter(batch)).state, next(iter(batch)).length) == (SampleState.WAITING, 2)


async def test_reopened_groups_start_empty() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    elsewhere = Ledger(journal, round_size=3)  # does not have them, as after a lost checkpoint
    await elsewhere.open(InFlight(make_plan(), version_number=3), GROUPS, make_prompts())

    _, batch = await restarted(journal)

    assert batch.unfinished == 6


@pytest.mark.parametrize(("change", "named"), [({"group_size": 3}, "group_size"), ({"seed": 1}, "run_seed")])
async def test_another_plan_is_refused(change: dict[str, Any], named: str) -> None:
    journal = MemoryJournal()
    await one_of_each(journal)

    with pytest.raises(UserError, match=f"different: {named}\\)") as error:
        await loaded(MemoryJournal(journal.disk), **change)
    assert error.value.where == "ledger.sqlite"
    assert "delete ledger.sqlite" in error.value.hint


async def test_other_prompts_are_refused() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger = Ledger(journal, round_size=3)

    with pytest.raises(UserError, match=r"\(different: prompt_id, prompt_digest, epoch\)"):
        await ledger.load(InFlight(make_plan(), version_number=3), lambda _: (0, make_prompt("p2")), after_step=3)


async def test_published_logprobs_are_restored() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger, batch = await restarted(journal)
    journal = ledger._journal  # type: ignore[assignment]
    following = plan_groups([(2, make_prompt("p0"))], first_position=12, from_version=3)
    await ledger.open(batch, following, make_prompts()[:1])
    young = next(iter(batch.group(12)))
    delta = make_delta(sample_id=young.sample_id, lease_id="young", tokens=[1, 2, 3])
    batch.assign("young", [young])
    await ledger.accept(batch, [make_report(delta)])
    assert [sample.ordinal - FIRST for sample in batch.missing_logprobs(4)] == [0, 1, 2, 6]
    assert batch.missing_logprobs(3) == []  # version 3 generated them

    said = {0: [-1.0], 2: [-2.0, -3.0], 6: [-4.0, -5.0, -6.0]}
    samples = [(batch.samples[FIRST + place], pack_logprobs(values)) for place, values in said.items()]
    await ledger.record_published(batch, 4, samples)

    assert [sample.ordinal - FIRST for sample in batch.missing_logprobs(4)] == [1]
    _, again = await restarted(journal)
    assert {s.ordinal - FIRST: s.published for s in again if s.published} == {
        place: {4: pack_logprobs(values)} for place, values in said.items()
    }
    assert [filed for filed, _ in await journal.load()][-2:] == [4, 5]  # one entry per round


async def test_a_restarted_sample_has_no_published_logprobs() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger, batch = await restarted(journal)
    sample = batch[FOLLOWING[2]]
    await ledger.record_published(batch, 4, [(sample, pack_logprobs([-2.0, -3.0]))])
    await ledger.restart(batch, [sample])

    _, again = await restarted(ledger._journal)  # type: ignore[arg-type]

    assert [one.published for one in again] == [{}] * 6


async def scramble(journal: MemoryJournal, kind: str) -> None:
    opened_blob, tokens, rewards = [entry for entry in await journal.load() if entry[0] != NEVER_PRUNED]
    published = (4, encode(Published(4, ((FIRST + 2, pack_logprobs([-1.0] * 3)),))))
    changed = {
        "not ours": [opened_blob, (4, b"\xc1")],
        "tokens twice": [opened_blob, tokens, tokens],
        "reward first": [opened_blob, rewards],
        "more published than made": [opened_blob, tokens, published],
    }[kind]
    await journal.prune(4)
    await journal.append(changed)


@pytest.mark.parametrize("kind", ["not ours", "tokens twice", "reward first", "more published than made"])
async def test_invalid_entries_are_refused(kind: str) -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    await scramble(journal, kind)

    with pytest.raises(UserError, match="entries of step 4") as caught:
        await restarted(journal)
    assert caught.value.where == "ledger.sqlite"


async def learn(ledger: Ledger, in_flight: InFlight, step: int, positions: Sequence[int]) -> None:
    """Finish, score and record a batch of these groups, as the loop does."""
    for position in positions:
        for sample in in_flight.group(position):
            if sample.finish is None:
                in_flight.assign("learning", [sample])
                delta = make_delta(
                    sample_id=sample.sample_id,
                    lease_id="learning",
                    attempt=sample.attempt,
                    start=sample.length,
                    finish="stop",
                )
                await ledger.accept(in_flight, [make_report(delta)])
            if sample.reward is None:
                await ledger.record_rewards(in_flight, [(sample, GOOD)])
    await ledger.record_batch(in_flight, step, positions, reward_mean=0.5)


async def test_restored_tokens_keep_their_worker() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    await generate(ledger, batch, [make_delta()])
    _, again = await restarted(journal)
    assert again.samples[FIRST].sources == [SourceRun(source="fake/w", lease="lease", start=0, end=2)]


async def test_groups_trained_on_before_the_checkpoint_are_not_restored() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    await learn(ledger, batch, 4, [9, 10, 11])

    _, again, following = await loaded(journal, after_step=4)  # the kill came between the checkpoint and the prune

    assert (following, len(again.samples)) == (0, 0)


async def test_a_batch_after_the_checkpoint_is_restored_in_order() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    await learn(ledger, batch, 4, [10, 9])
    assert list(batch.groups) == [11]

    ledger, again, following = await loaded(MemoryJournal(journal.disk))

    assert ledger.batches == {4: (10, 9)}
    assert (list(again.groups), following) == ([9, 10, 11], 2)  # a group of the second was started ahead
    assert [sample.state.value for sample in again] == ["scored"] * 4 + ["waiting"] * 2
    assert [s.ordinal for s in await ledger.record_batch(again, 4, [10, 9], reward_mean=0.5)] == [20, 21, 18, 19]


async def rounds(journal: MemoryJournal) -> set[int]:
    """Rounds that have entries."""
    return {filed for filed, _ in await journal.load() if filed != NEVER_PRUNED}


async def test_a_checkpoint_prunes_whole_rounds() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    following = plan_groups([(2, make_prompt("p0")), (2, make_prompt("p1"))], first_position=12, from_version=3)
    await ledger.open(batch, following, make_prompts()[:2])
    await learn(ledger, batch, 4, [9, 10, 12])
    await ledger.prune(batch, 4)
    assert await rounds(journal) == {4, 5}  # group 11 is of the round of step 4

    await learn(ledger, batch, 5, [11])
    await ledger.prune(batch, 5)
    assert await rounds(journal) == {5}  # group 13 is still in flight

    _, again, _ = await loaded(MemoryJournal(journal.disk), after_step=5)
    assert list(again.groups) == [13]


async def test_the_next_position_is_restored_after_dropped_groups() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    await ledger.drop(batch, 10)
    more = plan_groups([(2, make_prompt("p0"))], first_position=12, from_version=3)
    await ledger.open(batch, more, make_prompts()[:1])
    await learn(ledger, batch, 4, [9, 11, 12])
    await ledger.prune(batch, 4)

    again, in_flight, _ = await loaded(MemoryJournal(journal.disk), after_step=4)

    assert again.next_position == 13  # not 12 = four batches of three
    assert not in_flight.groups


async def test_dropped_groups_and_restarted_samples_are_restored() -> None:
    journal = MemoryJournal()
    batch = await one_of_each(journal)
    ledger, batch = await restarted(journal)
    journal = ledger._journal  # type: ignore[assignment]
    await ledger.restart(batch, [batch[FOLLOWING[0]], batch[FOLLOWING[1]]])
    await ledger.drop(batch, 10)

    _, again, _ = await loaded(MemoryJournal(journal.disk))

    assert list(again.groups) == [9, 11]
    assert {(sample.state, sample.length, sample.reward) for sample in again} == {(SampleState.WAITING, 0, None)}


async def test_entries_after_a_lost_checkpoint_are_discarded() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)

    _, batch, following = await loaded(journal, after_step=1)  # versions 2 and 3 cannot be recomputed

    assert (following, await rounds(journal), len(batch.samples)) == (0, set(), 0)


async def test_entries_after_a_lost_checkpoint_are_discarded_whatever_their_versions() -> None:
    """Groups begun far ahead, under the very weights that are now the newest again: of the round before nothing is
    left, because a checkpoint covered it."""
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    following = plan_groups([(2, make_prompt("p0"))], first_position=12, from_version=3)
    await ledger.open(batch, following, make_prompts()[:1])
    await learn(ledger, batch, 4, [9, 10, 11])
    await ledger.prune(batch, 4)

    again, in_flight, _ = await loaded(MemoryJournal(journal.disk), after_step=3)
    assert (again.next_position, list(in_flight.groups)) == (9, [])

    kept, in_flight, _ = await loaded(MemoryJournal(journal.disk), after_step=4)
    assert (kept.next_position, list(in_flight.groups)) == (13, [12])


async def test_after_a_lost_checkpoint_every_group_is_trained_on_once() -> None:
    """Step 4 trained on groups 9 and 11; 10 remained, 12 was started. Then the checkpoint of step 5 pruned them."""
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    following = plan_groups([(2, make_prompt("p0"))], first_position=12, from_version=3)
    await ledger.open(batch, following, make_prompts()[:1])
    await learn(ledger, batch, 4, [9, 11])
    await ledger.prune(batch, 4)
    await learn(ledger, batch, 5, [10, 12])
    await ledger.prune(batch, 5)

    for _ in range(2):  # the second time it resumes what the first started
        again, in_flight, _ = await loaded(journal, after_step=4)
        assert (again.next_position, sorted(in_flight.groups)) == (13, [10, 12])
        assert {sample.state for sample in in_flight} == {SampleState.WAITING}
        assert {sample.from_version for sample in in_flight} == {4}


async def test_a_checkpoint_during_a_replay_is_before_the_batches_that_follow() -> None:
    """A run killed after step 6 is resumed from step 3, and told to stop when it has replayed step 4."""
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    await learn(ledger, batch, 4, [9, 10, 11])
    await ledger.record_evidence(make_evidence(4))
    for step, position in ((5, 12), (6, 13)):
        pair = prompt_of(position)
        groups = plan_groups([pair], first_position=position, from_version=step - 1)
        await ledger.open(batch, groups, [pair[1]])
        await ledger.record_batch(batch, step, [position], reward_mean=1.0)
        await ledger.record_evidence(make_evidence(step))
    ledger, batch, _ = await loaded(journal)
    await learn(ledger, batch, 4, [9, 10, 11])
    await ledger.prune(batch, 4)

    ledger, batch, _ = await loaded(journal, after_step=4)
    assert (ledger.batches, [*ledger.evidence]) == ({5: (12,), 6: (13,)}, [4, 5, 6])

    for step, position in ((5, 12), (6, 13)):
        await ledger.record_batch(batch, step, [position], reward_mean=1.0)
    await ledger.prune(batch, 6)
    kept, _, _ = await loaded(MemoryJournal(journal.disk), after_step=6)
    assert [*kept.evidence] == [4, 5, 6]

    ledger, batch, _ = await loaded(journal, after_step=4)  # the checkpoint of step 6 is lost
    assert (ledger.next_position, list(batch.groups), [*ledger.evidence]) == (13, [12], [4])


def make_evidence(step: int) -> Evidence:
    return Evidence(step=step, proxy_mean=0.5, proxy_spread=0.5, samples=6)


async def test_entries_after_a_second_start_are_kept() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    await learn(ledger, batch, 4, [9, 10, 11])
    await ledger.prune(batch, 4)
    ledger, batch, _ = await loaded(journal, after_step=3)  # the checkpoint of step 4 is lost
    await ledger.open(batch, GROUPS, make_prompts())

    _, again, _ = await loaded(MemoryJournal(journal.disk), after_step=3)

    assert list(again.groups) == [9, 10, 11]


def result(step: int, digest: str = "a") -> EvalResult:
    return EvalResult(
        name="held_out",
        step=step,
        version=PolicyVersion(number=step, digest=digest),
        greedy_accuracy=0.5,
        n=2,
        invalid=0,
        truncated_fraction=0.0,
        completion_tokens_mean=1.0,
        duration_s=1.0,
    )


async def test_evaluation_figures_are_never_pruned_but_their_samples_are() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    samples = [make_trajectory(fabricated_prompt("1"), "2", version=V3.number)]
    await ledger.record_evaluation(result(3, "old"), [])
    await ledger.record_evaluation(result(3), [])
    await ledger.record_evaluation(result(4), samples)

    again, _ = await restarted(journal)
    assert [known.result for known in again.evaluations.values()] == [result(3), result(4)]
    assert again.evaluations[4, "held_out"].samples == tuple(samples)

    await learn(ledger, batch, 4, [9, 10, 11])
    await ledger.prune(batch, 4)
    pruned, _, _ = await loaded(MemoryJournal(journal.disk), after_step=4)
    assert pruned.evaluations[4, "held_out"].result == result(4)
    assert pruned.evaluations[4, "held_out"].samples == ()
    assert {step for step, _ in await journal.load()} == {NEVER_PRUNED}


async def test_without_a_journal_nothing_is_stored() -> None:
    ledger, batch = Ledger(None), InFlight(make_plan(), version_number=3)
    await ledger.open(batch, GROUPS, make_prompts())
    assert await generate(ledger, batch, [make_delta(finish="stop")]) == [0]
    await ledger.prune(batch, 4)
    assert await ledger.load(InFlight(make_plan(), version_number=3), prompt_of, after_step=0) == 0
