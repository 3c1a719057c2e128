"""Every transport of weights: what is put can be read, and a puller never takes wrong bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import numpy as np
import pytest

from tests.published import compute, publish, snapshot, tensors_of, version
from tidemill.core.protocols import LoopClock
from tidemill.weights import http_reader
from tidemill.weights.http_reader import HttpReader
from tidemill.weights.http_server import HttpTransport
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Blob, MemoryTransport, Missing, Snapshot, Transport
from tidemill.weights.store import WeightStore, snapshot_name

TOKEN = "secret"
Opened: TypeAlias = Callable[[], AbstractAsyncContextManager[tuple[Transport, Transport]]]
"""The publisher's end and a reader's."""


@asynccontextmanager
async def memory() -> AsyncIterator[tuple[Transport, Transport]]:
    transport = MemoryTransport(zero_copy=False)
    yield transport, transport


@asynccontextmanager
async def http() -> AsyncIterator[tuple[Transport, Transport]]:
    transport = HttpTransport("127.0.0.1", 0, TOKEN)
    reader = HttpReader(f"http://127.0.0.1:{transport.port}", TOKEN)
    try:
        yield transport, reader
    finally:
        await reader.close()
        await transport.close()


TRANSPORTS: dict[str, Opened] = {"memory": memory, "http": http}


@pytest.fixture(params=TRANSPORTS)
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Opened:
    monkeypatch.setattr(http_reader, "RANGE_BYTES", 1000)
    found: Opened = TRANSPORTS[request.param]
    return found


def blob_of(nbytes: int) -> Blob:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [1, 999, 1000, 1001, 5000, 123_457])
async def test_a_blob_arrives_whole(opened: Opened, nbytes: int) -> None:
    async with opened() as (publisher, reader):
        await publisher.put("a.snapshot", blob_of(nbytes))

        assert np.array_equal(await reader.get("a.snapshot"), blob_of(nbytes))


async def test_unknown_and_deleted_blobs_are_missing_and_held_ones_stay(opened: Opened) -> None:
    async with opened() as (publisher, reader):
        with pytest.raises(Missing):
            await reader.get("a.snapshot")
        await publisher.put("a.snapshot", blob_of(5000))
        held = await reader.get("a.snapshot")
        await publisher.delete("a.snapshot")
        await publisher.delete("a.snapshot")

        with pytest.raises(Missing):
            await reader.get("a.snapshot")
        assert np.array_equal(held, blob_of(5000))


async def test_several_readers_read_at_the_same_time(opened: Opened) -> None:
    async with opened() as (publisher, reader):
        for number in range(8):
            await publisher.put(f"{number}.snapshot", blob_of(2000 + number))

        found = await asyncio.gather(*(reader.get(f"{number}.snapshot") for number in range(8)))

        assert [len(blob) for blob in found] == [2000 + number for number in range(8)]


async def test_a_puller_follows_the_versions_by_deltas(opened: Opened) -> None:
    async with opened() as (publisher, reader):
        store, held = WeightStore(publisher, compute=compute()), list[Snapshot]()
        puller = Puller(reader, compute(), clock=LoopClock(), timeout_s=10.0)
        for number in range(1, 5):
            await publish(store, number)
            pulled = await puller.prepare(version(number))
            puller.swap(pulled, held.append)

            assert pulled.full == (number == 1)
            assert tensors_of(held[-1].buffer) == tensors_of(snapshot(number))
        with pytest.raises(Missing):
            await reader.get(snapshot_name(version(1)))
