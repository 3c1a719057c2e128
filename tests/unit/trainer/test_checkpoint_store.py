from __future__ import annotations

import errno
import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tidemill.core.errors import UserError
from tidemill.models.checkpoint_manifest import pinned, unpinned
from tidemill.trainer.checkpoint_store import CheckpointStore


def payload(text: str = "weights") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "state").mkdir()
        (folder / "model").write_text(text)
        (folder / "state" / "moments").write_text(text)

    return write


def names(root: Path) -> set[str]:
    """Everything in the folder, hidden or not."""
    return {path.name for path in root.iterdir()} if root.exists() else set()


def test_an_empty_store(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none", keep_last=1)
    assert store.recover() == []
    assert store.latest().checkpoint is None
    assert store.best() is None
    assert store.checkpoints() == []


def test_write_and_find_again(tmp_path: Path) -> None:
    written = CheckpointStore(tmp_path / "c", keep_last=1).write(3, payload(), score=0.25)
    assert (written.step, written.score, written.path) == (3, 0.25, tmp_path / "c" / "step_3")
    assert written.bytes == 2 * len("weights")
    latest = CheckpointStore(tmp_path / "c", keep_last=1).latest()
    assert latest.checkpoint == written
    assert latest.passed_over == ()
    assert (written.path / "state" / "moments").read_text() == "weights"


def test_keeps_the_last_ones_by_number(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (8, 9, 10, 11):
        store.write(step, payload())
    assert names(tmp_path) == {"step_10", "step_11"}


def test_keeps_the_best_besides(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, float("nan")), (5, 0.9)):
        store.write(step, payload(), score=score)
    assert names(tmp_path) == {"step_2", "step_5"}  # of equals the earlier
    best = CheckpointStore(tmp_path, keep_last=1).best()  # as a new process would read it
    assert best is not None
    assert best.step == 2
    store.write(6, payload(), score=0.95)
    assert names(tmp_path) == {"step_6"}


def test_without_keep_best_scores_save_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=False)
    store.write(1, payload(), score=0.9)
    store.write(2, payload(), score=0.1)
    assert names(tmp_path) == {"step_2"}


def test_older_ones_go_only_after_the_new_one_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())

    def write(folder: Path) -> None:
        assert store.latest().checkpoint is not None
        payload()(folder)

    store.write(2, write)
    assert names(tmp_path) == {"step_2"}


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload("old"))
    store.write(1, payload("new"))
    assert names(tmp_path) == {"step_1"}
    assert (tmp_path / "step_1" / "model").read_text() == "new"


def test_steps_of_an_abandoned_history_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    store.write(10, payload())
    store.write(20, payload(), score=1.0)
    (tmp_path / "step_20" / "model").write_text("damaged")
    latest = store.latest()
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 10
    store.write(15, payload())
    assert names(tmp_path) == {"step_10", "step_15"}


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_3").write_text("a file")
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())
    store.write(2, payload())
    assert names(tmp_path) == {"notes.txt", "step_x", "step_3", "step_2"}


@pytest.mark.parametrize("victim", ["model", "state/moments", "checkpoint.json"])
def test_a_damaged_newest_is_passed_over_with_a_reason(tmp_path: Path, victim: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        store.write(step, payload())
    (tmp_path / "step_3" / victim).write_text("x")
    (tmp_path / "step_2" / victim).unlink()
    latest = store.latest()
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1
    assert [damaged.path.name for damaged in latest.passed_over] == ["step_3", "step_2"]
    assert all(victim in damaged.reason for damaged in latest.passed_over)


def test_nothing_whole_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())
    (tmp_path / "step_1" / "model").unlink()
    with pytest.raises(UserError, match="no checkpoint is whole") as caught:
        store.latest()
    assert "step_1: model" in str(caught.value)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())

    def broken(folder: Path) -> None:
        payload()(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write(2, broken)
    assert names(tmp_path) == {"step_1"}


def full_disk(folder: Path) -> None:
    """A real ENOSPC, after some bytes went through."""
    (folder / "model").write_text("first part")
    with Path("/dev/full").open("w") as file:
        file.write("x" * 100_000)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fills_while_writing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())
    with pytest.raises(UserError, match="disk is full") as caught:
        store.write(2, full_disk, expected_bytes=12_345)
    assert "step_1 is unharmed" in str(caught.value)
    assert "12,345 bytes are needed" in str(caught.value)
    assert names(tmp_path) == {"step_1"}
    latest = store.latest()
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1
    store.write(2, payload())  # space again: the same store goes on
    assert names(tmp_path) == {"step_2"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fills_during_the_very_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no earlier checkpoint"):
        CheckpointStore(tmp_path, keep_last=1).write(1, full_disk)
    assert names(tmp_path) == set()


def test_a_disk_that_fills_while_replacing_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload("old"))
    rename = Path.rename

    def no_room(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", no_room)
    with pytest.raises(UserError, match="step_1 is unharmed"):
        store.write(1, payload("new"))
    assert names(tmp_path) == {"step_1"}
    assert (tmp_path / "step_1" / "model").read_text() == "old"


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload())  # 14 bytes: what the next one is taken to need
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=13))

    def unreached(folder: Path) -> None:
        raise AssertionError

    with pytest.raises(UserError, match="about 14 bytes are needed, 13 are free"):
        store.write(2, unreached)
    assert names(tmp_path) == {"step_1"}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=14))
    store.write(2, payload())


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write checkpoint step_1") as caught:
        CheckpointStore(tmp_path / "file" / "c", keep_last=1).write(1, payload())
    assert "writable" in str(caught.value)


def test_recover_removes_what_was_being_written_or_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    store.write(1, payload())
    for name in (".writing-step_2", ".deleting-step_0", ".replaced-step_1"):
        shutil.copytree(tmp_path / "step_1", tmp_path / name)
    assert store.recover() == ["step_2: an unfinished checkpoint was removed"]
    assert names(tmp_path) == {"step_1"}


def test_recover_puts_back_what_was_being_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, payload("old"))
    (tmp_path / "step_1").rename(tmp_path / ".replaced-step_1")  # killed before the new one took its place
    assert store.recover() == ["step_1: put back after an interrupted replacement"]
    assert (tmp_path / "step_1" / "model").read_text() == "old"
    assert store.latest().checkpoint is not None


def test_a_write_cleans_up_even_without_recover(tmp_path: Path) -> None:
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


def test_any_flipped_bit_of_the_newest_manifest_leaves_a_whole_checkpoint_to_resume_from(tmp_path: Path) -> None:
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
            if latest.checkpoint != newest:  # else the flip changed nothing that is read
                assert latest.checkpoint.step == 1, (position, bit)
                assert [(each.path.name, bool(each.reason)) for each in latest.passed_over] == [("step_2", True)]
    manifest.write_bytes(whole.replace(b"model", b"mod\xe5l"))
    assert store.best() == store.latest().checkpoint  # the one of step 1
    store.write(3, payload())
    assert [each.step for each in store.checkpoints()] == [1, 3]


def test_a_checkpoint_that_is_being_read_is_deleted_with_a_later_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    first = store.write(1, payload())
    with pinned(first.path) as there, pinned(first.path) as there_for_a_second_reader:
        assert there
        assert there_for_a_second_reader
        store.write(2, payload())
        assert names(tmp_path) == {"step_1", "step_2"}
    with pinned(first.path) as there:
        assert there
    store.write(3, payload())
    assert names(tmp_path) == {"step_3"}
    with pinned(first.path) as there:
        assert not there


def test_a_pinned_checkpoint_of_a_history_that_was_given_up_is_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    with pinned(store.write(5, payload()).path) as there:
        assert there
        store.write(4, payload())
    assert names(tmp_path) == {"step_4"}


def test_a_checkpoint_that_is_being_deleted_cannot_be_pinned(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path, keep_last=1).write(1, payload()).path
    with unpinned(folder) as free:
        assert free
        with pinned(folder) as there:
            assert not there
    with pinned(folder) as there:
        assert there


def test_file_systems_without_locks_pin_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    store = CheckpointStore(tmp_path, keep_last=1)
    with pinned(store.write(1, payload()).path) as there:
        assert there
        store.write(2, payload())
    assert names(tmp_path) == {"step_2"}
