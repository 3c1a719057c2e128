"""A lost reader process is replaced, and its samples are read again, a limited number of times."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.frozen_readers import named
from tidemill.core.errors import ReaderLost, TrainerLost
from tidemill.core.records import Growth, Read
from tidemill.runtime.cluster.ray_calls import Remote, trainer_lost
from tidemill.runtime.cluster.ray_reader import MAX_READS, MAX_RESTARTS, RayReader, reader_lost
from tidemill.runtime.cluster.wire import decode

READ = Read(values=b"\0\0\0\0", tokens_ahead=3, tokens_late=5)


class FakeRemote(Remote):
    """Answers `reads` calls, then its process is lost."""

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
    """Replacements for lost actors."""

    def __init__(self, *remotes: FakeRemote) -> None:
        self.remotes, self.started = list(remotes), 0

    async def another(self, lost: ReaderLost) -> Remote:
        self.started += 1
        await asyncio.sleep(0)
        return self.remotes.pop(0)


async def read(reader: RayReader, index: int = 0) -> Read:
    return await reader.read(named(index), b"\1\0\0\0", 1)


async def test_samples_in_flight_are_read_by_the_replacement() -> None:
    spares = Spares(FakeRemote(100))
    reader = RayReader(FakeRemote(2), restart=spares.another)
    found = await asyncio.gather(*(read(reader, index) for index in range(20)))
    assert found == [READ] * 20
    assert spares.started == 1  # one for all failed calls
    assert reader.take_counts() == (60, 100)
    await reader.close()


async def test_the_number_of_concurrent_reads_is_limited() -> None:
    remote = FakeRemote(1000)
    reader = RayReader(remote)
    await asyncio.gather(*(read(reader, index) for index in range(30)))
    assert remote.most == MAX_READS


async def test_repeated_losses_end_the_run_with_an_error() -> None:
    spares = Spares(*(FakeRemote(0) for _ in range(MAX_RESTARTS + 1)))
    reader = RayReader(FakeRemote(0), restart=spares.another)
    with pytest.raises(ReaderLost, match="the reference died: its process was killed") as caught:
        await read(reader)
    assert "run the same command again" in str(caught.value)
    assert spares.started == MAX_RESTARTS
    with pytest.raises(ReaderLost):
        await read(reader)
    assert spares.started == MAX_RESTARTS


async def test_a_read_sample_resets_the_number_of_restarts() -> None:
    spares = Spares(*(FakeRemote(1) for _ in range(2 * MAX_RESTARTS)))
    reader = RayReader(FakeRemote(1), restart=spares.another)
    for index in range(2 * MAX_RESTARTS):
        await read(reader, index)
    assert spares.started == 2 * MAX_RESTARTS - 1


async def test_a_failed_restart_is_raised_in_every_read() -> None:
    async def none(lost: ReaderLost) -> Remote:
        await asyncio.sleep(0)
        raise ReaderLost("it cannot be restarted")

    reader = RayReader(FakeRemote(0), restart=none)
    results = await asyncio.gather(*(read(reader, index) for index in range(3)), return_exceptions=True)
    assert {str(result) for result in results} == {"it cannot be restarted"}
    await reader.close()


async def test_a_reader_in_the_trainers_process_is_not_restarted() -> None:
    remote = FakeRemote(0)
    remote._lost = trainer_lost
    with pytest.raises(TrainerLost, match="the trainer died"):
        await read(RayReader(remote))


async def test_growth_is_sent_without_waiting() -> None:
    remote = FakeRemote(1)
    reader = RayReader(remote)
    growth = Growth(sample_id=named(0), prompt_tokens=1, start=0, token_ids=b"\1\0\0\0")
    reader.receive([growth])
    reader.forget([named(1)])
    (grow, told), (forget, _) = remote.asked
    assert (grow, forget) == ("receive", "forget")
    assert decode(told, list[Growth]) == [growth]
