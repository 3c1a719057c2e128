"""Every transport of weights: what is put can be read, and a puller never takes wrong bytes."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import ray

from tests.doubles.transport import corrupt
from tests.published import compute, publish, snapshot, tensors_of, version
from tidemill.core.errors import WeightsError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Pulled, WeightManifest
from tidemill.runtime.cluster.connection import connect, start_local_cluster
from tidemill.runtime.cluster.keeper import LocalClusterPlan, LocalNode
from tidemill.runtime.cluster.weight_transports import ObjectStoreReader, ObjectStoreTransport
from tidemill.weights import http_reader
from tidemill.weights.http_reader import HttpReader
from tidemill.weights.http_server import HttpTransport
from tidemill.weights.node_folder import SHARED_MEMORY, NodeFolder, NodePuller
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Blob, BlobSource, MemoryTransport, Missing, Snapshot, Transport
from tidemill.weights.store import WeightStore, delta_name, manifest_name, snapshot_name

TOKEN = "secret"
CALL_S = 30.0
PULL_S = 10.0
SETTINGS: dict[str, Any] = {"clock": LoopClock(), "timeout_s": PULL_S, "retry_pause_s": 0.01}


class Worker:
    """A puller, and the version that it holds."""

    def __init__(self, puller: Puller) -> None:
        self.puller = puller
        self.bound: list[Snapshot] = []

    async def load(self, number: int) -> Pulled:
        pulled = await self.puller.prepare(version(number))
        self.puller.swap(pulled, self.bound.extend)
        return pulled

    @property
    def tensors(self) -> list[bytes]:
        return tensors_of(self.bound[-1].buffer)


@dataclass
class Stage:
    """Both ends of a transport.

    Args:
        shares: pullers of a machine fetch a snapshot once.
        files: folder of the snapshots that they share.
    """

    publisher: Transport
    reader: BlobSource
    make_puller: Callable[[BlobSource], Puller] = lambda reader: Puller(reader, compute(), **SETTINGS)
    shares: bool = False
    files: Path | None = None
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = WeightStore(self.publisher, compute=compute())

    def worker(self) -> Worker:
        self.workers.append(Worker(self.make_puller(self.reader)))
        return self.workers[-1]

    async def publish(self, number: int) -> WeightManifest:
        return await publish(self.store, number)

    async def damage(self, name: str) -> None:
        """Flip a bit of the stored bytes."""
        await self.publisher.put(name, corrupt(await self.publisher.get(name)))

    async def close(self) -> None:
        for worker in self.workers:
            worker.bound.clear()
            worker.puller.close()
        await self.store.close()

    def left(self) -> list[str]:
        """Files in the folder of the snapshots."""
        return sorted(path.name for path in self.files.rglob("*")) if self.files is not None else []


Opened: TypeAlias = Callable[[], AbstractAsyncContextManager[Stage]]


@asynccontextmanager
async def memory() -> AsyncIterator[Stage]:
    transport = MemoryTransport(zero_copy=False)
    yield Stage(transport, transport)


@asynccontextmanager
async def http() -> AsyncIterator[Stage]:
    transport = HttpTransport("127.0.0.1", 0, TOKEN)
    reader = HttpReader(f"http://127.0.0.1:{transport.port}", TOKEN)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http_reader, "RANGE_BYTES", 1000)
            yield Stage(transport, reader)
    finally:
        await reader.close()
        await transport.close()


class PublisherActor(ObjectStoreTransport):
    async def blob(self, name: str) -> list[ray.ObjectRef[Blob]]:
        return self.refs(name)


class ActorTransport:
    """Implements `weights.snapshot.Transport` by the methods of a `PublisherActor`."""

    zero_copy = ObjectStoreTransport.zero_copy

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def put(self, name: str, blob: Blob) -> None:
        await asyncio.wait_for(self._actor.put.remote(name, blob), CALL_S)

    async def get(self, name: str) -> Blob:
        blob: Blob = await asyncio.wait_for(self._actor.get.remote(name), CALL_S)
        return blob

    async def delete(self, name: str) -> None:
        await asyncio.wait_for(self._actor.delete.remote(name), CALL_S)

    async def close(self) -> None:
        await asyncio.wait_for(self._actor.close.remote(), CALL_S)


@asynccontextmanager
async def object_store(actor: Any) -> AsyncIterator[Stage]:
    yield Stage(ActorTransport(actor), ObjectStoreReader(actor))


@asynccontextmanager
async def shm() -> AsyncIterator[Stage]:
    transport = MemoryTransport(zero_copy=False)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="tidemill-contract-") as parent:

        def make_puller(reader: BlobSource) -> Puller:
            return NodePuller(reader, compute(), folder=NodeFolder("contract", parent=Path(parent)), **SETTINGS)

        yield Stage(transport, transport, make_puller, shares=True, files=Path(parent))


TRANSPORTS: dict[str, Callable[..., AbstractAsyncContextManager[Stage]]]
TRANSPORTS = {"memory": memory, "http": http, "object_store": object_store, "shm": shm}
ON_RAY = (pytest.mark.xdist_group("ray"), pytest.mark.timeout(240))


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    """A publisher on a local cluster."""
    node = LocalNode(name="reserved", cpus=1, gpus=0, labels={})
    cluster = asyncio.run(start_local_cluster(LocalClusterPlan(nodes=(node,), object_store_bytes=100 << 20)))
    try:
        asyncio.run(connect(cluster.address, token=cluster.token))
        yield ray.remote(PublisherActor).options(num_cpus=1).remote()
    finally:
        ray.shutdown()
        asyncio.run(cluster.close())
    assert cluster.process.returncode == 0


@pytest.fixture(params=[pytest.param(name, marks=ON_RAY if name == "object_store" else ()) for name in TRANSPORTS])
def opened(request: pytest.FixtureRequest) -> Opened:
    started = [request.getfixturevalue("actor")] if request.param == "object_store" else []
    return partial(TRANSPORTS[request.param], *started)


@pytest.fixture
async def stage(opened: Opened) -> AsyncIterator[Stage]:
    async with opened() as stage:
        yield stage
        await stage.close()
        assert stage.left() == []


def blob_of(nbytes: int) -> Blob:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [1, 999, 1000, 1001, 5000, 123_457])
async def test_a_blob_arrives_whole(stage: Stage, nbytes: int) -> None:
    await stage.publisher.put("a.snapshot", blob_of(nbytes))

    assert np.array_equal(await stage.reader.get("a.snapshot"), blob_of(nbytes))


async def test_unknown_and_deleted_blobs_are_missing_and_held_ones_stay(stage: Stage) -> None:
    with pytest.raises(Missing):
        await stage.reader.get("a.snapshot")
    await stage.publisher.put("a.snapshot", blob_of(5000))
    held = await stage.reader.get("a.snapshot")
    await stage.publisher.delete("a.snapshot")
    await stage.publisher.delete("a.snapshot")

    with pytest.raises(Missing):
        await stage.reader.get("a.snapshot")
    assert np.array_equal(held, blob_of(5000))


async def test_several_readers_read_at_the_same_time(stage: Stage) -> None:
    for number in range(8):
        await stage.publisher.put(f"{number}.snapshot", blob_of(2000 + number))

    found = await asyncio.gather(*(stage.reader.get(f"{number}.snapshot") for number in range(8)))

    assert [len(blob) for blob in found] == [2000 + number for number in range(8)]


async def test_a_puller_follows_the_versions_by_deltas(stage: Stage) -> None:
    worker = stage.worker()
    for number in range(1, 5):
        await stage.publish(number)
        pulled = await worker.load(number)

        assert pulled.full == (number == 1)
        assert worker.tensors == tensors_of(snapshot(number))
    with pytest.raises(Missing):
        await stage.reader.get(snapshot_name(version(1)))


async def test_a_second_puller_of_the_machine_fetches_a_snapshot_only_if_none_is_shared(stage: Stage) -> None:
    first, second = stage.worker(), stage.worker()
    manifest = await stage.publish(1)
    await first.load(1)
    pulled = await second.load(1)

    assert pulled.full == (not stage.shares)
    assert (pulled.nbytes < manifest.nbytes) == stage.shares
    assert second.tensors == first.tensors == tensors_of(snapshot(1))


async def test_a_wrong_byte_in_a_delta_costs_a_whole_snapshot(stage: Stage) -> None:
    worker = stage.worker()
    await stage.publish(1)
    await worker.load(1)
    await stage.publish(2)
    await stage.damage(delta_name(version(2)))

    assert (await worker.load(2)).full
    assert worker.tensors == tensors_of(snapshot(2))


@pytest.mark.parametrize("kinds", [(manifest_name,), (snapshot_name, delta_name)], ids=["manifest", "snapshot"])
async def test_a_version_with_a_wrong_byte_is_refused_and_the_one_in_use_stays(
    stage: Stage, kinds: tuple[Callable[..., str], ...]
) -> None:
    worker = stage.worker()
    await stage.publish(1)
    await worker.load(1)
    await stage.publish(2)
    for kind in kinds:
        await stage.damage(kind(version(2)))

    began_s = time.monotonic()
    with pytest.raises(WeightsError, match="version 2"):
        await worker.load(2)
    assert time.monotonic() - began_s < PULL_S
    assert worker.tensors == tensors_of(snapshot(1))
    assert worker.bound[-1].manifest.version == version(1)

    await stage.publish(3)
    await worker.load(3)
    assert worker.tensors == tensors_of(snapshot(3))


async def test_a_first_snapshot_with_a_wrong_byte_is_refused_by_every_puller(stage: Stage) -> None:
    await stage.publish(1)
    await stage.damage(snapshot_name(version(1)))

    for worker in (stage.worker(), stage.worker()):
        with pytest.raises(WeightsError, match="version 1"):
            await worker.load(1)
        assert worker.bound == []


async def test_closing_leaves_nothing(stage: Stage) -> None:
    for worker in (stage.worker(), stage.worker()):
        await stage.publish(len(stage.workers))
        await worker.load(len(stage.workers))
    await stage.close()

    assert stage.left() == []
    for name in (manifest_name, snapshot_name):
        with pytest.raises(WeightsError):
            await stage.reader.get(name(version(2)))
