"""A reader in another process that dies: what was under way is asked of the next one, until there have been enough."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.frozen_readers import named
from tidemill.core.errors import ReaderLost, TrainerLost
from tidemill.core.records import Growth, Read
from tidemill.runtime.cluster.ray_calls import Remote, decode, trainer_lost
from tidemill.runtime.cluster.ray_reader import MAX_READS, MAX_RESTARTS, RayReader, reader_lost

READ = Read(numbers=b"\0\0\0\0", tokens_ahead=3, tokens_late=5)


class FakeRemote(Remote):
    """Answers `reads` times, then its process is gone."""

    def __init__(self, reads: int, *, who: str = "reference") -> None:
        super().__init__(None, lost=partial(reader_lost, who))
        self.reads, self.asked, self.under_way, self.most = reads, list[tuple[str, Any]](), 0, 0

    async def call(self, method: str, *args: object, kind: type[Any], timeout_s: float) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.reads == 0:
            raise self._lost("its process was killed (SIGKILL or out of memory)", "")
        self.reads -= 1
        return READ

    def ask(self, method: str, *args: object) -> asyncio.Future[bytes]:
        self.asked.append((method, *args))  # type: ignore[arg-type]
        return asyncio.get_running_loop().create_future()


class Spares:
    """Actors to take the place of lost ones."""

    def __init__(self, *remotes: FakeRemote) -> None:
        self.remotes, self.started = list(remotes), 0

    async def another(self, lost: ReaderLost) -> Remote:
        self.started += 1
        await asyncio.sleep(0)
        return self.remotes.pop(0)


async def read(reader: RayReader, index: int = 0) -> Read:
    return await reader.read(named(index), b"\1\0\0\0", 1)


async def test_what_was_under_way_is_asked_of_the_next_one() -> None:
    spares = Spares(FakeRemote(100))
    reader = RayReader(FakeRemote(2), restart=spares.another)
    found = await asyncio.gather(*(read(reader, index) for index in range(20)))
    assert found == [READ] * 20
    assert spares.started == 1  # for all whose call failed
    assert reader.take_counts() == (60, 100)
    await reader.close()


async def test_only_so_many_are_asked_for_at_once() -> None:
    remote = FakeRemote(1000)
    reader = RayReader(remote)
    await asyncio.gather(*(read(reader, index) for index in range(30)))
    assert remote.most == MAX_READS


async def test_one_that_dies_again_and_again_ends_the_run_in_words() -> None:
    spares = Spares(*(FakeRemote(0) for _ in range(MAX_RESTARTS + 1)))
    reader = RayReader(FakeRemote(0), restart=spares.another)
    with pytest.raises(ReaderLost, match="the reference died: its process was killed") as caught:
        await read(reader)
    assert "run the same command again" in str(caught.value)
    assert spares.started == MAX_RESTARTS
    with pytest.raises(ReaderLost):
        await read(reader)
    assert spares.started == MAX_RESTARTS


async def test_a_sample_read_in_between_counts_as_well_again() -> None:
    spares = Spares(*(FakeRemote(1) for _ in range(2 * MAX_RESTARTS)))
    reader = RayReader(FakeRemote(1), restart=spares.another)
    for index in range(2 * MAX_RESTARTS):
        await read(reader, index)
    assert spares.started == 2 * MAX_RESTARTS - 1


async def test_none_to_be_had_is_told_to_everybody() -> None:
    async def none(lost: ReaderLost) -> Remote:
        await asyncio.sleep(0)
        raise ReaderLost("and it does not start again")

    reader = RayReader(FakeRemote(0), restart=none)
    results = await asyncio.gather(*(read(reader, index) for index in range(3)), return_exceptions=True)
    assert {str(result) for result in results} == {"and it does not start again"}
    await reader.close()


async def test_a_reader_in_the_trainers_process_ends_with_it() -> None:
    remote = FakeRemote(0)
    remote._lost = trainer_lost
    with pytest.raises(TrainerLost, match="the trainer died"):
        await read(RayReader(remote))


async def test_advice_is_sent_and_not_waited_for() -> None:
    remote = FakeRemote(1)
    reader = RayReader(remote)
    growth = Growth(sample_id=named(0), prompt_tokens=1, start=0, token_ids=b"\1\0\0\0")
    reader.grow([growth])
    reader.forget([named(1)])
    (grow, told), (forget, _) = remote.asked
    assert (grow, forget) == ("grow", "forget")
    assert decode(told, list[Growth]) == [growth]
