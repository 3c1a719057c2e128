"""The ledger: what is journalled, and what a restart makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.fabricated_run import make_prompt, make_trajectory
from tests.fake_fleet import PROMPTS, V3, make_delta, make_id, make_plan, make_report
from tidemill.controller.batch import Batch
from tidemill.controller.entries import EvalResult
from tidemill.controller.ledger import OUTLIVES_CHECKPOINTS, Ledger
from tidemill.controller.memory_journal import MemoryJournal
from tidemill.controller.samples import SampleState
from tidemill.core.buffers import pack_tokens, unpack_tokens
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion, Reward, TokenDelta

GOOD = Reward(value=1.0, components={"exact": 1.0})
FOLLOWING = [make_id("p0", 0), make_id("p0", 1), make_id("p1", 0)]


async def opened(journal: MemoryJournal, *, after_step: int = 3, step: int = 4) -> tuple[Ledger, Batch]:
    ledger = Ledger(journal)
    await ledger.load(after_step=after_step)
    return ledger, await ledger.open(make_plan(step=step), PROMPTS, version_number=3)


async def restarted(journal: MemoryJournal, **where: int) -> tuple[Ledger, Batch]:
    return await opened(MemoryJournal(journal.disk), **where)


async def generate(ledger: Ledger, batch: Batch, deltas: Sequence[TokenDelta]) -> list[int]:
    batch.assign("lease")
    return [sample.ordinal for sample in await ledger.accept(batch, [make_report(*deltas)])]


async def one_of_each(journal: MemoryJournal) -> Batch:
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
    await ledger.reward(batch, [(batch[first], GOOD)])
    return batch


async def test_a_restart_finds_every_sample_where_it_was() -> None:
    journal = MemoryJournal()
    before = await one_of_each(journal)

    _, batch = await restarted(journal)

    assert [sample.state.value for sample in batch.samples] == ["scored", "finished", *["waiting"] * 4]
    assert [unpack_tokens(bytes(sample.token_ids)) for sample in batch.samples[:4]] == [[7], [8], [9, 10], []]
    assert batch.samples[0].reward == GOOD
    assert [s.logprobs for s in batch.samples] == [s.logprobs for s in before.samples]
    assert [s.versions for s in batch.samples] == [s.versions for s in before.samples]
    assert [s.finish for s in batch.samples[:3]] == ["stop", "length", None]
    assert (batch.tokens_recovered, batch.tokens_accepted, batch.unfinished, batch.scored) == (4, 0, 4, 1)


async def test_a_partial_sample_goes_on_in_a_new_attempt() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger, batch = await restarted(journal)

    request = batch.assign("new lease")[0]

    assert (request.sample_id, request.attempt, request.prefix_ids) == (FOLLOWING[2], 2, pack_tokens([9, 10]))
    late = make_delta(sample_id=FOLLOWING[2], start=2, attempt=1)
    assert await ledger.accept(batch, [make_report(late)]) == []
    assert dict(batch.ignored) == {"stale_lease": 1}


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
    assert [sample.state.value for sample in again.samples] == ["finished"] * 3 + ["waiting"] * 3


async def test_a_message_without_news_is_not_journalled() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    appends = journal.appends

    await generate(ledger, batch, [make_delta(lease_id="stale"), make_delta(tokens=[])])
    await ledger.reward(batch, [])

    assert journal.appends == appends


async def test_tokens_of_a_sample_called_back_are_journalled() -> None:
    journal = MemoryJournal()
    ledger, batch = await opened(journal)
    await generate(ledger, batch, [make_delta(finish="aborted")])

    _, batch = await restarted(journal)

    assert (batch.samples[0].state, batch.samples[0].length) == (SampleState.WAITING, 2)


async def test_a_batch_begun_again_starts_empty() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    elsewhere = Ledger(journal)  # does not know of it, as after a hole in the history
    await elsewhere.open(make_plan(), PROMPTS, version_number=3)

    _, batch = await restarted(journal)

    assert batch.unfinished == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompts": PROMPTS[:2]}, "groups, prompts_digest"),
        ({"group_size": 3}, "group_size"),
        ({"seed": 1}, "run_seed"),
    ],
)
async def test_another_batch_under_the_same_step_is_refused(change: dict[str, Any], named: str) -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger = Ledger(MemoryJournal(journal.disk))
    await ledger.load(after_step=3)

    with pytest.raises(UserError, match=f"step 4 was begun with another batch \\(different: {named}\\)") as error:
        await ledger.open(make_plan(**change), change.get("prompts", PROMPTS), version_number=3)
    assert "delete ledger.sqlite" in str(error.value)


async def scramble(journal: MemoryJournal, kind: str) -> None:
    blobs = await journal.load()
    opened_blob, tokens, rewards = blobs
    changed = {
        "not ours": [opened_blob, (4, b"\xc1")],
        "tokens twice": [opened_blob, tokens, tokens],
        "reward first": [opened_blob, rewards],
    }[kind]
    await journal.prune(4)
    for step, blob in changed:
        await journal.append(step, [blob])


@pytest.mark.parametrize("kind", ["not ours", "tokens twice", "reward first"])
async def test_entries_that_make_no_sense_are_refused(kind: str) -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    await scramble(journal, kind)

    with pytest.raises(UserError, match="entries of step 4 make no sense"):
        await restarted(journal)


async def test_a_checkpoint_makes_batches_superfluous() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger = Ledger(journal)

    assert await ledger.load(after_step=4) == 0  # the kill came between the checkpoint and the prune

    assert await journal.load() == []


async def test_batches_that_do_not_follow_the_checkpoint_are_forgotten() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger = Ledger(journal)

    assert await ledger.load(after_step=1) == 0  # steps 2 and 3 are nowhere

    assert await journal.load() == []
    assert (await ledger.open(make_plan(), PROMPTS, version_number=3)).unfinished == 6


async def test_several_batches_follow() -> None:
    journal = MemoryJournal()
    await one_of_each(journal)
    ledger = Ledger(journal)
    await ledger.open(make_plan(step=5), PROMPTS, version_number=4)

    assert await Ledger(journal).load(after_step=3) == 2


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


async def test_an_evaluation_outlives_checkpoints_and_its_samples_do_not() -> None:
    journal = MemoryJournal()
    ledger, _ = await opened(journal)
    samples = [make_trajectory(make_prompt("1"), "2", version=V3.number)]
    await ledger.evaluated(result(3, "old"), [])
    await ledger.evaluated(result(3), [])
    await ledger.evaluated(result(4), samples)

    again, _ = await restarted(journal)
    assert {step: known.result for step, known in again.evaluations.items()} == {3: result(3), 4: result(4)}
    assert again.evaluations[4].samples == tuple(samples)

    await ledger.prune(4)
    pruned = Ledger(MemoryJournal(journal.disk))
    await pruned.load(after_step=4)
    assert pruned.evaluations[4].result == result(4)
    assert pruned.evaluations[4].samples == ()
    assert {step for step, _ in await journal.load()} == {OUTLIVES_CHECKPOINTS}


async def test_without_a_journal_nothing_is_kept() -> None:
    ledger = Ledger(None)
    batch = await ledger.open(make_plan(), PROMPTS, version_number=3)
    assert await generate(ledger, batch, [make_delta(finish="stop")]) == [0]
    await ledger.prune(4)
    assert await ledger.load(after_step=0) == 0
