"""Workers of a machine share a snapshot: pulled once, verified, never changed, deleted when nobody uses it.

The rows of a sharded trainer are a snapshot for each rank, which are used together or not at all.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.doubles.transport import FaultyTransport, corrupt
from tests.published import compute, publish, rows_of_rank, snapshot, tensors_of, version
from tidemill.core.errors import WeightsError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Pulled, TensorEntry
from tidemill.weights import node_folder
from tidemill.weights.node_folder import NodeFolder, NodePuller, forget_snapshots, remove_abandoned
from tidemill.weights.puller import PullerGroup
from tidemill.weights.snapshot import Blob, BlobSource, Snapshot, joined_part_sums, part_sums
from tidemill.weights.store import WeightStore, delta_name, manifest_name, snapshot_name

WORKERS = 4
# Ends while it writes the second of two snapshots.
KILLED = """
import asyncio, os, sys
from pathlib import Path
from tidemill.weights.node_folder import NodeFolder
async def main():
    folder = NodeFolder(sys.argv[1], parent=Path(sys.argv[2]))
    async with folder.writing():
        for name in ("first", "second"):
            file, partial = folder.create(1000)
            file.buffer[:] = 7
            if name == "second":
                os._exit(9)
            folder.complete(partial, name)
asyncio.run(main())
"""


def node_puller(source: BlobSource, parent: Path, rank: int = 0) -> NodePuller:
    folder = NodeFolder("run", rank=rank, parent=parent)
    return NodePuller(source, compute(), clock=LoopClock(), folder=folder, timeout_s=5.0, retry_pause_s=0.01)


class Worker:
    def __init__(self, transport: FaultyTransport, parent: Path) -> None:
        self.puller = node_puller(transport, parent)
        self.bound: list[Snapshot] = []

    async def load(self, number: int) -> Pulled:
        pulled = await self.puller.prepare(version(number))
        self.puller.swap(pulled, self.bound.extend)
        return pulled

    @property
    def tensors(self) -> list[bytes]:
        return tensors_of(self.bound[-1].buffer)


@pytest.fixture
def transport() -> FaultyTransport:
    return FaultyTransport(zero_copy=False)


@pytest.fixture
def workers(transport: FaultyTransport, tmp_path: Path) -> Iterator[list[Worker]]:
    found = [Worker(transport, tmp_path) for _ in range(WORKERS)]
    yield found
    for worker in found:
        worker.puller.close()
    assert list(tmp_path.iterdir()) == []


def files(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.glob("*/*"))


async def test_all_workers_pull_a_version_once(
    workers: list[Worker], transport: FaultyTransport, tmp_path: Path
) -> None:
    store = WeightStore(transport, compute=compute())
    for number in range(1, 5):
        manifest = await publish(store, number)
        transport.reads.clear()

        pulls = await asyncio.gather(*(worker.load(number) for worker in workers))

        assert all(worker.tensors == tensors_of(snapshot(number)) for worker in workers)
        assert sum(name.endswith((".snapshot", ".delta")) for name in transport.reads) == 1
        assert [pull.full for pull in pulls].count(True) == (number == 1)
        assert files(tmp_path) == [manifest.digest]


async def test_a_snapshot_cannot_be_changed(workers: list[Worker], transport: FaultyTransport) -> None:
    await publish(WeightStore(transport, compute=compute()), 1)
    for worker in workers[:2]:
        await worker.load(1)
        with pytest.raises(ValueError, match="read-only"):
            worker.bound[-1].buffer[0] = 1


async def test_a_version_stays_until_its_last_user_has_another(
    workers: list[Worker], transport: FaultyTransport, tmp_path: Path
) -> None:
    store = WeightStore(transport, compute=compute())
    await publish(store, 1)
    for worker in workers:
        await worker.load(1)
    await publish(store, 2)
    for worker in workers[:-1]:
        await worker.load(2)

    assert len(files(tmp_path)) == 2
    assert workers[-1].tensors == tensors_of(snapshot(1))
    await workers[-1].load(2)
    assert len(files(tmp_path)) == 1


async def test_damaged_bytes_are_never_shared(
    workers: list[Worker], transport: FaultyTransport, tmp_path: Path
) -> None:
    await publish(WeightStore(transport, compute=compute()), 1)
    transport.spoil("snapshot", corrupt, times=2)

    pulled = await workers[0].load(1)

    assert pulled.retries == 2
    assert workers[0].tensors == tensors_of(snapshot(1))
    assert (await workers[1].load(1)).nbytes < pulled.nbytes / 2
    assert len(files(tmp_path)) == 1


async def test_a_full_memory_is_told(
    workers: list[Worker], transport: FaultyTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await publish(WeightStore(transport, compute=compute()), 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightsError, match="no room for"):
        await workers[0].load(1)
    assert files(tmp_path) == []


async def test_a_writer_that_hangs_delays_others_only_until_their_deadline(
    workers: list[Worker], transport: FaultyTransport, tmp_path: Path
) -> None:
    await publish(WeightStore(transport, compute=compute()), 1)
    workers[0].puller._timeout_s = 0.2

    async with NodeFolder("run", parent=tmp_path).writing():
        with pytest.raises(WeightsError, match="version 1"):
            await workers[0].load(1)
    await workers[0].load(1)


async def test_files_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    for number in range(3):
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, f"run-{number}", str(tmp_path))
        assert await owner.wait() == 9
    used = NodeFolder("used", parent=tmp_path)
    async with used.writing():
        file, partial = used.create(10)
        used.complete(partial, "digest")

    remove_abandoned(tmp_path)

    assert files(tmp_path) == ["digest"]
    file.close()
    remove_abandoned(tmp_path)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_the_folder_is_that_of_this_user() -> None:
    assert str(os.getuid()) in NodeFolder("run").path.name
    assert NodeFolder("run").path.parent == node_folder.SHARED_MEMORY


LARGE = (
    TensorEntry(name="embed", dtype="bfloat16", shape=(3001, 96), offset=0, nbytes=576_192, checksum=0),
    TensorEntry(name="norm", dtype="bfloat16", shape=(7,), offset=576_192, nbytes=14, checksum=0),
    TensorEntry(name="head", dtype="bfloat16", shape=(2000, 101), offset=576_256, nbytes=404_000, checksum=0),
)
"""Large enough that manifests are less than a hundredth; rows of an odd number of bytes, which end within words."""
LARGE_BYTES = 980_256
SHARE = 1.02
"""Most bytes that a machine may pull, relative to the model."""


def weights(number: int) -> Blob:
    """Each version differs from the one before in a thousandth of its elements."""
    elements = np.random.default_rng(0).integers(0, 1 << 16, LARGE_BYTES // 2).astype(np.uint16)
    for step in range(1, number + 1):
        elements[np.random.default_rng(step).integers(0, len(elements), len(elements) // 1000)] += 1
    return elements.view(np.uint8)


def tensors_in(number: int) -> list[bytes]:
    whole = weights(number)
    return [whole[entry.offset : entry.offset + entry.nbytes].tobytes() for entry in LARGE]


def joined(parts: Sequence[Snapshot]) -> list[bytes]:
    rows = ([(each.buffer, entry) for entry in each.manifest.tensors] for each in parts)
    return [
        b"".join(buffer[entry.offset : entry.offset + entry.nbytes].tobytes() for buffer, entry in pieces)
        for pieces in zip(*rows, strict=True)
    ]


class ShardedWorker:
    """Pulls from every rank of the trainer."""

    def __init__(self, sources: Sequence[BlobSource], parent: Path) -> None:
        self.puller = PullerGroup([node_puller(source, parent, rank) for rank, source in enumerate(sources)])
        self.parts: Sequence[Snapshot] = ()

    async def load(self, number: int) -> Pulled:
        pulled = await self.puller.prepare(version(number))
        self.puller.swap(pulled, self.bind)
        return pulled

    def bind(self, parts: Sequence[Snapshot]) -> None:
        self.parts = parts


class Node:
    """A sharded trainer, and two workers of one machine."""

    def __init__(self, ranks: int, parent: Path) -> None:
        self.ranks, self.parent = ranks, parent
        self.transports = [FaultyTransport(zero_copy=False) for _ in range(ranks)]
        self.stores = [WeightStore(each, compute=compute()) for each in self.transports]
        self.workers = [ShardedWorker(self.transports, parent) for _ in range(2)]

    async def publish(self, number: int, *, ranks: Sequence[int] = ()) -> None:
        for rank in ranks or range(self.ranks):
            rows = rows_of_rank(LARGE, weights(number), rank, self.ranks)
            await self.stores[rank].publish(version(number), *rows)
            self.transports[rank].nbytes = 0  # the store reads the version before

    @property
    def nbytes(self) -> int:
        """Bytes that the machine has pulled since the last version."""
        return sum(each.nbytes for each in self.transports)

    def digests(self) -> list[str]:
        return sorted(store.latest.digest for store in self.stores if store.latest is not None)

    def close(self) -> None:
        for worker in self.workers:
            worker.parts = ()
            worker.puller.close()


@pytest.fixture(params=[2, 3])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    opened = Node(request.param, tmp_path)
    yield opened
    opened.close()
    assert list(tmp_path.iterdir()) == []


async def test_the_rows_of_every_rank_are_pulled_once(node: Node) -> None:
    for number in range(1, 5):
        await node.publish(number)
        pulls = await asyncio.gather(*(worker.load(number) for worker in node.workers))

        manifests = 2 * sum(len(each.blobs[manifest_name(version(number))]) for each in node.transports)
        blob = snapshot_name if number == 1 else delta_name
        once = sum(len(each.blobs[blob(version(number))]) for each in node.transports)
        assert node.nbytes == manifests + once <= SHARE * LARGE_BYTES
        assert sum(pull.nbytes for pull in pulls) == manifests + once
        assert (once < 0.01 * LARGE_BYTES) == (number > 1)
        for worker in node.workers:
            assert joined(worker.parts) == tensors_in(number)
            assert joined_part_sums(worker.parts) == part_sums(LARGE, weights(number))
            assert [part.file and part.file.read_bytes() for part in worker.parts] == [
                part.buffer.tobytes() for part in worker.parts
            ]
        assert files(node.parent) == node.digests()


async def test_a_version_that_was_prepared_in_vain_is_released(node: Node) -> None:
    for number in range(1, 4):
        await node.publish(number)
        await node.workers[0].puller.prepare(version(number))
        assert files(node.parent) == node.digests()  # the one before was never used


async def test_ranks_with_different_versions_are_never_used_together(node: Node) -> None:
    await node.publish(1)
    for worker in node.workers:
        await worker.load(1)
    await node.publish(2, ranks=[0])  # the other ranks never publish it

    for worker in node.workers:
        with pytest.raises(WeightsError, match="version 2"):
            await worker.load(2)
        assert joined(worker.parts) == tensors_in(1)

    await node.publish(3)
    for kind in (manifest_name, snapshot_name):  # the last rank serves version 1 by the name of version 3
        blobs = node.transports[-1].blobs
        blobs[kind(version(3))] = blobs[kind(version(1))]
    with pytest.raises(WeightsError, match="the ranks published different versions"):
        await node.workers[0].load(3)
    assert joined(node.workers[0].parts) == tensors_in(1)
    await node.publish(4)
    await node.workers[0].load(4)
    assert joined(node.workers[0].parts) == tensors_in(4)


async def test_ranks_change_their_versions_together_or_not_at_all(node: Node) -> None:
    worker = node.workers[0]
    await node.publish(1)
    await worker.load(1)
    await node.publish(2)
    pulled = await worker.puller.prepare(version(2))

    def fails(parts: Sequence[Snapshot]) -> None:
        raise RuntimeError("a rank of the engine ended")

    with pytest.raises(RuntimeError, match="a rank of the engine ended"):
        worker.puller.swap(pulled, fails)
    assert joined(worker.parts) == tensors_in(1)
    assert all(part.file is not None and part.file.exists() for part in worker.parts)
    assert not (await worker.load(2)).full  # still from version 1, of all ranks


async def test_a_rank_that_is_not_written_delays_no_other_rank(node: Node) -> None:
    await node.publish(1)
    worker = node.workers[0]
    for puller in worker.puller._pullers:
        puller._timeout_s = 0.2

    async with NodeFolder("run", parent=node.parent).writing():
        with pytest.raises(WeightsError, match="version 1: pull exceeded"):
            await worker.load(1)
    assert len(files(node.parent)) == node.ranks - 1
    await worker.load(1)
    assert node.nbytes <= SHARE * LARGE_BYTES


# Stops while it writes the rows of rank 1.
WRITING = """
import asyncio, sys, time
from pathlib import Path
from tidemill.weights.node_folder import NodeFolder
async def main():
    folder = NodeFolder("run", rank=1, parent=Path(sys.argv[1]))
    async with folder.writing():
        file, partial = folder.create(1000)
        file.buffer[:500] = 7
        print("writing", flush=True)
        time.sleep(60.0)
asyncio.run(main())
"""


async def test_a_process_that_is_killed_while_it_writes_leaves_nothing(node: Node) -> None:
    await node.publish(1)
    pipe = asyncio.subprocess.PIPE
    writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITING, str(node.parent), stdout=pipe)
    assert writer.stdout is not None
    await writer.stdout.readline()
    loads = [asyncio.create_task(worker.load(1)) for worker in node.workers]
    await asyncio.sleep(0.3)
    assert not any(load.done() for load in loads)

    writer.kill()
    await asyncio.gather(*loads)

    assert files(node.parent) == node.digests()
    assert node.nbytes <= SHARE * LARGE_BYTES
    assert all(joined(worker.parts) == tensors_in(1) for worker in node.workers)
    await writer.wait()


# Loads the versions 1, 2, ... of blobs in a folder; dies by SIGKILL at any moment.
LOADING = """
import asyncio, random, sys
from pathlib import Path
import numpy as np
from tests.unit.weights.test_node_folder import FolderSource, ShardedWorker, joined, tensors_in
from tidemill.core.errors import WeightsError
async def main(parent, blobs, ranks, first, last):
    worker = ShardedWorker([FolderSource(Path(blobs) / str(rank)) for rank in range(int(ranks))], Path(parent))
    for number in range(int(first), int(last) + 1):
        await worker.load(number)
        assert joined(worker.parts) == tensors_in(number)
        print(number, flush=True)
    sys.stdin.read()
asyncio.run(main(*sys.argv[1:]))
"""


class FolderSource:
    """Implements `weights.snapshot.BlobSource` with a file for each blob."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def get(self, name: str) -> Blob:
        await asyncio.sleep(random.uniform(0.0, 0.02))
        return np.fromfile(self._folder / name, np.uint8)

    async def close(self) -> None:
        pass


@pytest.mark.timeout(180)
async def test_processes_that_are_killed_at_any_moment_block_no_other(tmp_path: Path) -> None:
    ranks, last, parent = 3, 12, tmp_path / "shm"
    parent.mkdir()
    trainer = Node(ranks, parent)
    for rank, transport in enumerate(trainer.transports):
        (tmp_path / str(rank)).mkdir()
        for number in range(1, last + 1):
            await trainer.publish(number, ranks=[rank])
            for name, blob in transport.blobs.items():
                blob.tofile(tmp_path / str(rank) / name)
    trainer.close()

    async def loading(first: int) -> asyncio.subprocess.Process:
        arguments = (str(parent), str(tmp_path), str(ranks), str(first), str(last))
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-c", LOADING, *arguments, stdin=pipe, stdout=pipe)

    async def killed_and_started_again(rng: random.Random) -> asyncio.subprocess.Process:
        reached = 0
        for deaths in (1, 1, 0):
            process = await loading(reached + 1)
            assert process.stdout is not None
            target = rng.randint(reached + 1, last - 1) if deaths else last
            while reached < target:
                reached = int(await process.stdout.readline())
            if deaths:
                await asyncio.sleep(rng.uniform(0.0, 0.03))
                process.send_signal(signal.SIGKILL)
                await process.wait()
        return process

    survivors = await asyncio.gather(*(killed_and_started_again(random.Random(seed)) for seed in range(2)))

    assert files(parent) == trainer.digests()
    for process in survivors:
        process.kill()
        await process.wait()
    await forget_snapshots("run", parent=parent)
    assert list(parent.iterdir()) == []
