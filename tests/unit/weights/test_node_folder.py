"""Workers of a machine share a snapshot: pulled once, verified, never changed, deleted when nobody uses it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.transport import FaultyTransport, corrupt
from tests.published import compute, publish, snapshot, tensors_of, version
from tidemill.core.errors import WeightsError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Pulled
from tidemill.weights import node_folder
from tidemill.weights.node_folder import NodeFolder, NodePuller, remove_abandoned
from tidemill.weights.snapshot import Snapshot
from tidemill.weights.store import WeightStore

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


class Worker:
    def __init__(self, transport: FaultyTransport, parent: Path) -> None:
        folder = NodeFolder("run", parent=parent)
        self.puller = NodePuller(transport, compute(), clock=LoopClock(), folder=folder, timeout_s=5.0)
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
