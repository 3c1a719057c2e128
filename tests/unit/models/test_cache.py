"""The build-once folder: what it accepts, what it repairs, what it leaves behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tidemill.core.errors import DeadlineError, UserError
from tidemill.core.folders import cache_dir
from tidemill.models.cache import MANIFEST, build_once, damage, is_built

Build = Callable[[Path], None]


def ignore(_: str) -> None:
    pass


def writer(content: bytes = b"weights") -> Build:
    def build(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)
        (folder / "more").mkdir()
        (folder / "more" / "config.json").write_text("{}")

    return build


def forbidden(_: Path) -> None:
    raise AssertionError("built although the folder was complete")


def test_cache_dir_prefers_its_own_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TIDEMILL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "tidemill"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert cache_dir() == tmp_path / "xdg" / "tidemill"
    monkeypatch.setenv("TIDEMILL_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


def test_a_folder_is_built_once_and_then_only_checked(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    assert not is_built(folder)
    assert build_once(folder, writer(), progress=ignore) == folder
    assert is_built(folder) and damage(folder) == ""
    assert build_once(folder, forbidden, progress=ignore) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert folder.stat().st_mode & 0o777 == 0o755  # others on the machine may read it


def _truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weig")


def _flip_a_bit(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weightt")


def _remove_a_file(folder: Path) -> None:
    (folder / "more" / "config.json").unlink()


def _break_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"files": ')


def _empty_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"files": []}')


def _remove_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_truncate, "model.safetensors has 4 bytes instead of 7"),
        (_flip_a_bit, "model.safetensors does not match its checksum"),
        (_remove_a_file, "config.json: No such file"),
        (_break_the_manifest, f"{MANIFEST} is damaged"),
        (_empty_the_manifest, f"{MANIFEST} is damaged"),
        (_remove_the_manifest, f"{MANIFEST}: No such file"),
    ],
)
def test_a_damaged_folder_is_reported_and_built_again(spoil: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    folder = build_once(tmp_path / "model", writer(), progress=ignore)
    spoil(folder)
    lines: list[str] = []
    build_once(folder, writer(), progress=lines.append)
    assert len(lines) == 1 and told in lines[0] and str(folder) in lines[0]
    assert damage(folder) == ""
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


def test_a_failing_build_leaves_nothing_and_its_error_passes_through(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "model", build, progress=ignore)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    build_once(tmp_path / "model", writer(), progress=ignore)  # the lock is free again


def test_a_damaged_folder_survives_a_failing_rebuild(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "model", writer(), progress=ignore)
    _flip_a_bit(folder)

    def build(_: Path) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(folder, build, progress=ignore)
    assert (folder / "model.safetensors").read_bytes() == b"weightt"


def test_leftovers_of_killed_builds_of_this_folder_only_are_removed(tmp_path: Path) -> None:
    mine, others = tmp_path / ".model.partial-abc", tmp_path / ".model2.partial-abc"
    for leftover in (mine, others):
        leftover.mkdir()
        (leftover / "half").write_bytes(b"x")
    build_once(tmp_path / "model", writer(), progress=ignore)
    assert not mine.exists()
    assert others.exists()


def test_waiting_for_a_lock_names_the_holder_and_times_out(tmp_path: Path) -> None:
    (tmp_path / ".model.owner").write_text("process 4711 on tidepool")
    lines: list[str] = []
    with (
        FileLock(tmp_path / ".model.lock", is_singleton=False),
        pytest.raises(DeadlineError, match=r"process 4711 on tidepool.*model.*\.model\.lock"),
    ):
        build_once(tmp_path / "model", forbidden, progress=lines.append, lock_deadline_s=0.6)
    assert len(lines) == 1 and "process 4711 on tidepool" in lines[0] and ".model.lock" in lines[0]


def test_too_little_space_is_reported_before_building(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1000000\.0 GB are needed") as caught:
        build_once(tmp_path / "model", forbidden, progress=ignore, needs_bytes=10**15)
    assert "TIDEMILL_CACHE" in caught.value.hint


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "cannot be written"), (errno.EACCES, "cannot be written")],
)
def test_disk_errors_are_user_errors(number: int, told: str, tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(number, "as it is")

    with pytest.raises(UserError, match=told) as caught:
        build_once(tmp_path / "model", build, progress=ignore)
    assert "TIDEMILL_CACHE" in caught.value.hint
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_cache_path_through_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        build_once(tmp_path / "file" / "model", forbidden, progress=ignore)


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced: list[str] = []
    named_at: list[int] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real_fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        named_at.append(len(synced))
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    build_once(tmp_path / "model", writer(), progress=ignore)
    assert len(named_at) == 1
    before = synced[: named_at[0]]
    assert {"model.safetensors", "config.json", MANIFEST, "more"} <= set(before)
    assert before[-1].startswith(".model.partial-")  # the folder itself, after its files
    assert synced[named_at[0] :] == [tmp_path.name]  # and the name


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "model", writer(), progress=ignore)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert {name: entry["bytes"] for name, entry in files.items()} == {"model.safetensors": 7, "more/config.json": 2}
    shutil.rmtree(folder)
    assert damage(folder) == f"{MANIFEST}: No such file or directory"
