"""Published weights as files: seen whole, mapped, and gone with their owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.published import compute, publish, snapshot, tensors_of, version
from tidemill.core.clock import LoopClock
from tidemill.core.errors import UserError, WeightsError
from tidemill.runtime import file_transport
from tidemill.runtime.file_transport import SHARED_MEMORY, FileTransport
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Snapshot
from tidemill.weights.store import WeightStore

OWNER = """
import asyncio, sys, time
from pathlib import Path
import numpy as np
from tidemill.runtime.file_transport import FileTransport
async def main():
    transport = FileTransport.create(Path(sys.argv[1]))
    await transport.put("blob", np.ones(10, np.uint8))
    print(transport.folder, flush=True)
    time.sleep(60)
asyncio.run(main())
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_what_is_published_here_can_be_pulled_there(tmp_path: Path) -> None:
    owner = FileTransport.create(tmp_path)
    store = WeightStore(owner, compute=compute())
    puller = Puller(FileTransport(owner.folder), compute(), clock=LoopClock())
    bound: list[Snapshot] = []
    for number in (1, 2, 3):
        assert (await publish(store, number)).delta is None  # a mapped file costs nothing
        pulled = await puller.prepare(version(number))
        puller.swap(pulled, bound.append)
        assert pulled.full
    held = bound[1].buffer
    await publish(store, 4)
    assert [name for name in names(owner.folder) if "snapshot" in name] == ["3-d3.snapshot", "4-d4.snapshot"]
    assert tensors_of(held) == tensors_of(snapshot(2))  # unlinked, and still there for who has it
    await store.close()
    assert names(tmp_path) == []
    assert tensors_of(held) == tensors_of(snapshot(2))
    with pytest.raises(WeightsError, match=r"there is no 4-d4\.manifest"):
        await Puller(FileTransport(owner.folder), compute(), clock=LoopClock(), retry_pause_s=0.0).prepare(version(4))


async def test_a_mapped_blob_is_page_aligned_and_read_only(tmp_path: Path) -> None:
    owner = FileTransport.create(tmp_path)
    await owner.put("blob", np.arange(10, dtype=np.uint8))
    await owner.put("empty", np.empty(0, np.uint8))
    blob = await owner.get("blob")
    assert blob.tolist() == list(range(10))
    assert blob.ctypes.data % 4096 == 0
    assert not blob.flags.writeable
    assert len(await owner.get("empty")) == 0
    await owner.put("blob", np.zeros(3, np.uint8))  # replaced, not overwritten
    assert blob.tolist() == list(range(10))
    await owner.delete("blob")
    await owner.delete("blob")
    await owner.close()


async def test_a_write_without_room_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = FileTransport.create(tmp_path)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(UserError, match="No space left on device") as caught:
            await owner.put("blob", np.ones(10, np.uint8))
    assert caught.value.where == str(owner.folder)
    assert names(owner.folder) == []
    await owner.close()


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be published there"):
        FileTransport.create(tmp_path / "file")


def test_shared_memory_is_taken_when_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert file_transport._roomy(1 << 60) == tmp_path
    if SHARED_MEMORY.is_dir():
        assert file_transport._roomy(1) == SHARED_MEMORY


def test_what_a_killed_owner_left_is_deleted_by_the_next_and_a_living_one_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        folders = [Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout is not None]
        assert all((folder / "blob").is_file() for folder in folders)
        os.kill(owners[0].pid, signal.SIGKILL)
        owners[0].wait(10)
        third = FileTransport.create(tmp_path)
        assert [folder.exists() for folder in folders] == [False, True]
        asyncio.run(third.close())
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
    asyncio.run(FileTransport.create(tmp_path).close())
    assert names(tmp_path) == []
