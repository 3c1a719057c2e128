"""A reader in this process reads ahead while its thread is idle; results do not depend on that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from transformers import PreTrainedModel

from tests.frozen_readers import CHUNK, frozen, named, read_all, reader, tokens
from tidemill.core.records import Growth
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.readers import LocalReader
from tidemill.trainer.scoring import ChunkedReader

PROMPT = 6
IDS = tokens(PROMPT + 3 * CHUNK + 2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return frozen()


@pytest.fixture
async def thread() -> AsyncIterator[ComputeThread]:
    made = ComputeThread("reading")
    yield made
    await made.close()


def grown(index: int, start: int, end: int, ids: bytes = IDS) -> Growth:
    return Growth(sample_id=named(index), prompt_tokens=PROMPT, start=start, token_ids=ids[start * 4 : end * 4])


async def until_held(chunked: ChunkedReader, tokens_held: int) -> None:
    async with asyncio.timeout(10.0):
        while chunked.tokens_held != tokens_held:  # noqa: ASYNC110 - nobody says so
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("owned", [True, False])
async def test_a_sample_is_read_while_it_grows(model: PreTrainedModel, owned: bool) -> None:
    chunked, thread = reader(model), ComputeThread("reading")
    local = LocalReader(chunked, thread, owned=owned)
    expected = read_all(reader(model, cache=0), named(0), IDS, PROMPT).values
    local.receive([grown(0, 0, PROMPT)])
    await until_held(chunked, PROMPT)
    local.receive([grown(0, PROMPT, PROMPT + CHUNK + 3)])
    await until_held(chunked, PROMPT + CHUNK)
    local.receive([grown(0, PROMPT + CHUNK + 3, PROMPT + 3 * CHUNK)])
    await until_held(chunked, PROMPT + 3 * CHUNK)
    read = await local.read(named(0), IDS, PROMPT)
    assert (read.values, read.tokens_ahead, read.tokens_late) == (expected, PROMPT + 3 * CHUNK, 2)
    assert local.take_counts() == (PROMPT + 3 * CHUNK, 2)
    assert local.take_counts() == (0, 0)
    await local.read(named(0, purpose="eval:held_out"), IDS, PROMPT)
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

    class Noting(ChunkedReader):
        def read_ahead(self, sample_id: object, *rest: object) -> bool:
            order.append(f"ahead {named_index(sample_id)}")
            return super().read_ahead(sample_id, *rest)  # type: ignore[arg-type]

        def read_finished(self, sample_id: object, *rest: object) -> object:  # type: ignore[override]
            order.append(f"read {named_index(sample_id)}")
            return super().read_finished(sample_id, *rest)  # type: ignore[arg-type]

    def named_index(sample_id: object) -> int:
        return sample_id.index  # type: ignore[attr-defined, no-any-return]

    plain = reader(model)
    chunked = Noting(model, plain._scorer, chunk_tokens=CHUNK, cache_tokens=1000)
    local = LocalReader(chunked, thread, owned=False)
    busy = asyncio.create_task(thread.run(lambda: go_on.wait(10.0)))
    await asyncio.sleep(0)
    local.receive([grown(0, 0, PROMPT + 2 * CHUNK), grown(1, 0, PROMPT + 2 * CHUNK, tokens(40, seed=3))])
    reading = asyncio.create_task(local.read(named(2), IDS, PROMPT))
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(busy, reading)
    await until_held(chunked, 2 * PROMPT + 4 * CHUNK)
    # The prompt of 6, three chunks of 8 and the last one of 2 of the finished one; then the others, a chunk each.
    assert order[:5] == ["read 2"] * 5
    assert order[5:11] == ["ahead 0", "ahead 1"] * 3
    await local.close()


async def test_a_restarted_or_dropped_sample_leaves_nothing(model: PreTrainedModel, thread: ComputeThread) -> None:
    chunked = reader(model, cache=100)
    local = LocalReader(chunked, thread, owned=False)
    local.receive([grown(0, 0, PROMPT + CHUNK), grown(1, 0, PROMPT + CHUNK)])
    await until_held(chunked, PROMPT + 2 * CHUNK)
    local.forget([named(0), named(1)])
    other = IDS[: PROMPT * 4] + tokens(20, seed=9)
    local.receive([grown(0, 0, PROMPT + CHUNK, other)])
    await until_held(chunked, PROMPT + CHUNK)
    assert (await local.read(named(0), other, PROMPT)).values == read_all(reader(model), named(0), other, PROMPT).values
    assert chunked.tokens_held == PROMPT
    await local.close()


async def test_a_sample_restarted_while_it_is_read_is_read_correctly(
    model: PreTrainedModel, thread: ComputeThread
) -> None:
    chunked, go_on = reader(model), threading.Event()
    local = LocalReader(chunked, thread, owned=True)
    busy = asyncio.create_task(thread.run(lambda: go_on.wait(10.0)))
    reading = asyncio.create_task(local.read(named(0), IDS, PROMPT))
    await asyncio.sleep(0)
    other = IDS[: PROMPT * 4] + tokens(3 * CHUNK, seed=9)
    local.receive([grown(0, 0, PROMPT + CHUNK, other)])
    local.receive([grown(0, PROMPT + CHUNK, PROMPT + 2 * CHUNK, other)])
    go_on.set()
    async with asyncio.timeout(10.0):
        first, second = await asyncio.gather(reading, local.read(named(0), other, PROMPT))
    await busy
    for read, ids in ((first, IDS), (second, other)):
        assert read.values == read_all(reader(model), named(0), ids, PROMPT).values
    local.receive([grown(0, 0, PROMPT + CHUNK, other)])  # it is read ahead again
    await until_held(chunked, PROMPT + CHUNK)
    await local.close()


async def test_growth_after_lost_tokens_is_ignored(model: PreTrainedModel, thread: ComputeThread) -> None:
    local = LocalReader(reader(model), thread, owned=False)
    local.receive([grown(0, PROMPT, PROMPT + CHUNK)])  # the tokens before were lost
    local.receive([grown(1, 0, PROMPT + 2), grown(1, PROMPT + 5, PROMPT + CHUNK)])
    read = await local.read(named(1), IDS, PROMPT)
    assert read.values == read_all(reader(model), named(1), IDS, PROMPT).values
    await local.close()


async def test_a_failure_while_reading_ahead_is_raised_by_read(model: PreTrainedModel, thread: ComputeThread) -> None:
    chunked = reader(model)
    local = LocalReader(chunked, thread, owned=False)
    failed = threading.Event()

    def fail(*_: object) -> bool:
        failed.set()
        raise RuntimeError("out of memory")

    chunked.read_ahead = fail  # type: ignore[assignment, method-assign]
    local.receive([grown(0, 0, PROMPT)])
    async with asyncio.timeout(10.0):
        while not failed.is_set():  # noqa: ASYNC110 - it happens on another thread
            await asyncio.sleep(0.001)
    with pytest.raises(RuntimeError, match="out of memory"):
        await local.read(named(0), IDS, PROMPT)
    await local.close()
