"""A frozen model in this process computes ahead while its thread is idle; results do not depend on that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from transformers import PreTrainedModel

from tests.frozen_scorers import CHUNK, chunked_scorer, frozen, named, score_all, tokens
from tidemill.core.records import NewTokens
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.frozen_scorers import LocalFrozenScorer
from tidemill.trainer.scoring import ChunkedScorer

PROMPT = 6
IDS = tokens(PROMPT + 3 * CHUNK + 2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return frozen()


@pytest.fixture
async def thread() -> AsyncIterator[ComputeThread]:
    made = ComputeThread("frozen")
    yield made
    await made.close()


def grown(index: int, start: int, end: int, ids: bytes = IDS) -> NewTokens:
    return NewTokens(sample_id=named(index), prompt_tokens=PROMPT, start=start, token_ids=ids[start * 4 : end * 4])


async def until_held(chunked: ChunkedScorer, tokens_held: int) -> None:
    async with asyncio.timeout(10.0):
        while chunked.tokens_held != tokens_held:  # noqa: ASYNC110 - nobody says so
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("owned", [True, False])
async def test_a_sample_is_computed_while_it_grows(model: PreTrainedModel, owned: bool) -> None:
    chunked, thread = chunked_scorer(model), ComputeThread("frozen")
    local = LocalFrozenScorer(chunked, thread, owned=owned)
    expected = score_all(chunked_scorer(model, cache=0), named(0), IDS, PROMPT).values
    local.receive([grown(0, 0, PROMPT)])
    await until_held(chunked, PROMPT)
    local.receive([grown(0, PROMPT, PROMPT + CHUNK + 3)])
    await until_held(chunked, PROMPT + CHUNK)
    local.receive([grown(0, PROMPT + CHUNK + 3, PROMPT + 3 * CHUNK)])
    await until_held(chunked, PROMPT + 3 * CHUNK)
    scores = await local.score(named(0), IDS, PROMPT)
    assert (scores.values, scores.tokens_ahead, scores.tokens_late) == (expected, PROMPT + 3 * CHUNK, 2)
    assert local.take_counts() == (PROMPT + 3 * CHUNK, 2)
    assert local.take_counts() == (0, 0)
    await local.score(named(0, purpose="eval:held_out"), IDS, PROMPT)
    assert local.take_counts() == (0, 0)  # only training samples count
    await local.close()
    if owned:
        with pytest.raises(RuntimeError, match="closed"):
            await thread.run(lambda: 1)
    else:
        await thread.close()


async def test_samples_ahead_take_turns_and_finished_ones_come_first(
    model: PreTrainedModel, thread: ComputeThread
) -> None:
    order, go_on = list[str](), threading.Event()

    class Noting(ChunkedScorer):
        def compute_ahead(self, sample_id: object, *rest: object) -> bool:
            order.append(f"ahead {named_index(sample_id)}")
            return super().compute_ahead(sample_id, *rest)  # type: ignore[arg-type]

        def score_finished(self, sample_id: object, *rest: object) -> object:  # type: ignore[override]
            order.append(f"finished {named_index(sample_id)}")
            return super().score_finished(sample_id, *rest)  # type: ignore[arg-type]

    def named_index(sample_id: object) -> int:
        return sample_id.index  # type: ignore[attr-defined, no-any-return]

    plain = chunked_scorer(model)
    chunked = Noting(model, plain._scorer, chunk_tokens=CHUNK, cache_tokens=1000)
    local = LocalFrozenScorer(chunked, thread, owned=False)
    busy = asyncio.create_task(thread.run(lambda: go_on.wait(10.0)))
    await asyncio.sleep(0)
    local.receive([grown(0, 0, PROMPT + 2 * CHUNK), grown(1, 0, PROMPT + 2 * CHUNK, tokens(40, seed=3))])
    scoring = asyncio.create_task(local.score(named(2), IDS, PROMPT))
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(busy, scoring)
    await until_held(chunked, 2 * PROMPT + 4 * CHUNK)
    # The prompt of 6, three chunks of 8 and the last one of 2 of the finished one; then the others, a chunk each.
    assert order[:5] == ["finished 2"] * 5
    assert order[5:11] == ["ahead 0", "ahead 1"] * 3
    await local.close()


async def test_a_restarted_or_dropped_sample_leaves_nothing(model: PreTrainedModel, thread: ComputeThread) -> None:
    chunked = chunked_scorer(model, cache=100)
    local = LocalFrozenScorer(chunked, thread, owned=False)
    local.receive([grown(0, 0, PROMPT + CHUNK), grown(1, 0, PROMPT + CHUNK)])
    await until_held(chunked, PROMPT + 2 * CHUNK)
    local.forget([named(0), named(1)])
    other = IDS[: PROMPT * 4] + tokens(20, seed=9)
    local.receive([grown(0, 0, PROMPT + CHUNK, other)])
    await until_held(chunked, PROMPT + CHUNK)
    assert (await local.score(named(0), other, PROMPT)).values == score_all(
        chunked_scorer(model), named(0), other, PROMPT
    ).values
    assert chunked.tokens_held == PROMPT
    await local.close()


async def test_a_sample_restarted_while_it_is_scored_is_scored_correctly(
    model: PreTrainedModel, thread: ComputeThread
) -> None:
    chunked, go_on = chunked_scorer(model), threading.Event()
    local = LocalFrozenScorer(chunked, thread, owned=True)
    busy = asyncio.create_task(thread.run(lambda: go_on.wait(10.0)))
    scoring = asyncio.create_task(local.score(named(0), IDS, PROMPT))
    await asyncio.sleep(0)
    other = IDS[: PROMPT * 4] + tokens(3 * CHUNK, seed=9)
    local.receive([grown(0, 0, PROMPT + CHUNK, other)])
    local.receive([grown(0, PROMPT + CHUNK, PROMPT + 2 * CHUNK, other)])
    go_on.set()
    async with asyncio.timeout(10.0):
        first, second = await asyncio.gather(scoring, local.score(named(0), other, PROMPT))
    await busy
    for scores, ids in ((first, IDS), (second, other)):
        assert scores.values == score_all(chunked_scorer(model), named(0), ids, PROMPT).values
    local.receive([grown(0, 0, PROMPT + CHUNK, other)])  # it is computed ahead again
    await until_held(chunked, PROMPT + CHUNK)
    await local.close()


async def test_new_tokens_after_lost_tokens_are_ignored(model: PreTrainedModel, thread: ComputeThread) -> None:
    local = LocalFrozenScorer(chunked_scorer(model), thread, owned=False)
    local.receive([grown(0, PROMPT, PROMPT + CHUNK)])  # the tokens before were lost
    local.receive([grown(1, 0, PROMPT + 2), grown(1, PROMPT + 5, PROMPT + CHUNK)])
    scores = await local.score(named(1), IDS, PROMPT)
    assert scores.values == score_all(chunked_scorer(model), named(1), IDS, PROMPT).values
    await local.close()


async def test_a_failure_while_computing_ahead_is_raised_by_score(
    model: PreTrainedModel, thread: ComputeThread
) -> None:
    chunked = chunked_scorer(model)
    local = LocalFrozenScorer(chunked, thread, owned=False)
    failed = threading.Event()

    def fail(*_: object) -> bool:
        failed.set()
        raise RuntimeError("out of memory")

    chunked.compute_ahead = fail  # type: ignore[assignment, method-assign]
    local.receive([grown(0, 0, PROMPT)])
    async with asyncio.timeout(10.0):
        while not failed.is_set():  # noqa: ASYNC110 - it happens on another thread
            await asyncio.sleep(0.001)
    with pytest.raises(RuntimeError, match="out of memory"):
        await local.score(named(0), IDS, PROMPT)
    await local.close()
