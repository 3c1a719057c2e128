from __future__ import annotations

import errno
import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor

from tidemill.core.errors import UserError
from tidemill.models.checkpoint_manifest import pinned, unpinned
from tidemill.trainer.checkpoint_store import CheckpointStore, write_together


def payload(text: str = "weights") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "state").mkdir()
        (folder / "model").write_text(text)
        (folder / "state" / "moments").write_text(text)

    return write


def names(root: Path) -> set[str]:
    """Names in the folder, including hidden ones."""
    return {path.name for path in root.iterdir()} if root.exists() else set()


def test_an_empty_store(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none", keep_last=1)
    assert store.recover() == []
    assert store.latest().checkpoint is None
    assert store.best() is None
    assert store.checkpoints() == []


def test_write_and_read_back(tmp_path: Path) -> None:
    written = CheckpointStore(tmp_path / "c", keep_last=1).write(3, payload(), score=0.25)
    assert (written.step, written.score, written.path) == (3, 0.25, tmp_path / "c" / "step_3")
    assert written.bytes == 2 * len("weights")
    latest = CheckpointStore(tmp_path / "c", keep_last=1).latest()
    assert latest.checkpoint == written
    assert latest.skipped == {}
    assert (written.path / "state" / "moments").read_text() == "weights"


def test_the_last_checkpoints_are_kept_by_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (8, 9, 10, 11):
        store.write(step, payload())
    assert names(tmp_path) == {"step_10", "step_11"}


def test_the_best_checkpoint_is_also_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, float("nan")), (5, 0.9)):
        store.write(step, payload(), score=score)
    assert names(tmp_path) == {"step_2", "step_5"}  # the earlier of equal scores
    best = CheckpointStore(tmp_path, keep_last=1).best()  # as a new process would read it
    assert best is not None
    assert best.step == 2
    store.write(6, payload(), score=0.95)
    assert names(tmp_path) == {"step_6"}


def test_without_keep_best_scores_are_ignored(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=False)
    store.write(1, payload(), score=0.9)
    store.write(2, payload(), score=0.1)
    assert names(tmp_path) == {"step_2"}


def test_older_checkpoints_are_deleted_after_the_new_one_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())

    def write(folder: Path) -> None:
        assert store.latest().checkpoint is not None
        payload()(folder)

    store.write(2, write)
    assert names(tmp_path) == {"step_2"}


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload("old"))
    store.write(1, payload("new"))
    assert names(tmp_path) == {"step_1"}
    assert (tmp_path / "step_1" / "model").read_text() == "new"


def test_later_steps_of_a_discarded_history_are_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    store.write(10, payload())
    store.write(20, payload(), score=1.0)
    (tmp_path / "step_20" / "model").write_text("damaged")
    latest = store.latest()
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 10
    store.write(15, payload())
    assert names(tmp_path) == {"step_10", "step_15"}


def test_other_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_3").write_text("a file")
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())
    store.write(2, payload())
    assert names(tmp_path) == {"notes.txt", "step_x", "step_3", "step_2"}


@pytest.mark.parametrize("victim", ["model", "state/moments", "checkpoint.json"])
def test_damaged_checkpoints_are_skipped_with_a_reason(tmp_path: Path, victim: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        store.write(step, payload())
    (tmp_path / "step_3" / victim).write_text("x")
    (tmp_path / "step_2" / victim).unlink()
    latest = store.latest()
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1
    assert list(latest.skipped) == ["step_3", "step_2"]
    assert all(victim in reason for reason in latest.skipped.values())


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())
    (tmp_path / "step_1" / "model").unlink()
    with pytest.raises(UserError, match="step_1: model") as caught:
        store.latest()
    assert caught.value.where == str(tmp_path)


def test_a_failed_writer_leaves_no_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())

    def broken(folder: Path) -> None:
        payload()(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write(2, broken)
    assert names(tmp_path) == {"step_1"}


def full_disk(folder: Path) -> None:
    """Raises a real ENOSPC after some bytes were written."""
    (folder / "model").write_text("first part")
    with Path("/dev/full").open("w") as file:
        file.write("x" * 100_000)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fills_up_during_a_write(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())
    with pytest.raises(UserError, match="disk is full") as caught:
        store.write(2, full_disk, expected_bytes=12_345)
    assert "step_1" in caught.value.hint
    assert "12,345 bytes needed" in caught.value.what
    assert names(tmp_path) == {"step_1"}
    latest = store.latest()
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1
    store.write(2, payload())  # with free space again, the same store works
    assert names(tmp_path) == {"step_2"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fills_up_during_the_first_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no earlier checkpoint"):
        CheckpointStore(tmp_path, keep_last=1).write(1, full_disk)
    assert names(tmp_path) == set()


def test_a_disk_that_fills_up_while_a_step_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload("old"))
    rename = Path.rename

    def no_room(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", no_room)
    with pytest.raises(UserError, match="step_1 is intact"):
        store.write(1, payload("new"))
    assert names(tmp_path) == {"step_1"}
    assert (tmp_path / "step_1" / "model").read_text() == "old"


def test_too_little_space_is_detected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())  # 14 bytes, the expected size of the next one
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=13))

    def unreached(folder: Path) -> None:
        raise AssertionError

    with pytest.raises(UserError, match="about 14 bytes needed, 13 free"):
        store.write(2, unreached)
    assert names(tmp_path) == {"step_1"}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=14))
    store.write(2, payload())


def test_a_folder_that_cannot_be_created_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write checkpoint step_1") as caught:
        CheckpointStore(tmp_path / "file" / "c", keep_last=1).write(1, payload())
    assert "writable" in caught.value.hint


def test_recover_removes_unfinished_writes_and_deletions(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    store.write(1, payload())
    for name in (".writing-step_2", ".deleting-step_0", ".replaced-step_1"):
        shutil.copytree(tmp_path / "step_1", tmp_path / name)
    assert store.recover() == ["step_2: removed an unfinished checkpoint"]
    assert names(tmp_path) == {"step_1"}


def test_recover_restores_a_checkpoint_that_was_being_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload("old"))
    (tmp_path / "step_1").rename(tmp_path / ".replaced-step_1")  # killed before the new one was renamed
    assert store.recover() == ["step_1: restored after an interrupted replacement"]
    assert (tmp_path / "step_1" / "model").read_text() == "old"
    assert store.latest().checkpoint is not None


def test_a_write_removes_leftovers_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / ".writing-step_1").mkdir()
    (tmp_path / ".writing-step_1" / "junk").write_text("torn")
    written = CheckpointStore(tmp_path, keep_last=1).write(1, payload())
    assert not (written.path / "junk").exists()
    assert names(tmp_path) == {"step_1"}


def test_files_and_folders_are_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    flushed: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def recording_rename(self: Path, target: Path) -> Path:
        flushed.append(f"rename to {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    CheckpointStore(tmp_path / "c", keep_last=1).write(1, payload())
    before, after = flushed[: flushed.index("rename to step_1")], flushed[flushed.index("rename to step_1") + 1 :]
    assert {"model", "moments", "checkpoint.json", "state", ".writing-step_1"} <= set(before)
    assert after == ["c"]


def test_any_flipped_bit_in_the_newest_manifest_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    store.write(1, payload("older"), score=0.25)
    newest = store.write(2, payload(), score=0.5)
    manifest = newest.path / "checkpoint.json"
    whole = manifest.read_bytes()
    for position, byte in enumerate(whole):
        for bit in range(8):
            manifest.write_bytes(whole[:position] + bytes([byte ^ 1 << bit]) + whole[position + 1 :])
            latest = store.latest()
            assert latest.checkpoint is not None
            if latest.checkpoint != newest:  # otherwise the flipped bit has no effect
                assert latest.checkpoint.step == 1, (position, bit)
                assert list(latest.skipped) == ["step_2"]
                assert latest.skipped["step_2"]
    manifest.write_bytes(whole.replace(b"model", b"mod\xe5l"))
    assert store.best() == store.latest().checkpoint  # the one of step 1
    store.write(3, payload())
    assert [each.step for each in store.checkpoints()] == [1, 3]


def test_a_pinned_checkpoint_is_deleted_after_a_later_write(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    first = store.write(1, payload())
    with pinned(first.path) as exists, pinned(first.path) as exists_for_second_reader:
        assert exists
        assert exists_for_second_reader
        store.write(2, payload())
        assert names(tmp_path) == {"step_1", "step_2"}
    with pinned(first.path) as exists:
        assert exists
    store.write(3, payload())
    assert names(tmp_path) == {"step_3"}
    with pinned(first.path) as exists:
        assert not exists


def test_a_pinned_checkpoint_of_a_discarded_history_is_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    with pinned(store.write(5, payload()).path) as exists:
        assert exists
        store.write(4, payload())
    assert names(tmp_path) == {"step_4"}


def test_a_checkpoint_that_is_being_deleted_cannot_be_pinned(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path, keep_last=1).write(1, payload()).path
    with unpinned(folder) as free:
        assert free
        with pinned(folder) as exists:
            assert not exists
    with pinned(folder) as exists:
        assert exists


def test_without_file_locks_nothing_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    store = CheckpointStore(tmp_path, keep_last=1)
    with pinned(store.write(1, payload()).path) as exists:
        assert exists
        store.write(2, payload())
    assert names(tmp_path) == {"step_2"}


class SecondRank:
    """Of two; the first one has announced `folder`."""

    size, index = 2, 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all_sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, value: bytes) -> list[bytes]:
        return [str(self._folder).encode(), b""]

    def barrier(self) -> None:
        pass


def test_a_full_disk_of_another_rank_is_told_as_such(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full: cannot write checkpoint step_3"):
        write_together(CheckpointStore(tmp_path, keep_last=1), 3, full, ranks=SecondRank(tmp_path))
