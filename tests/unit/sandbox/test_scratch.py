"""The files of a sandbox, handled from outside: the host follows no link."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest

from tidemill.sandbox import SandboxError
from tidemill.sandbox.scratch import Scratch


def scratch(folder: Path, limit_bytes: int = 1 << 20, limit_files: int = 100) -> Scratch:
    folder.mkdir(exist_ok=True)
    return Scratch(str(folder), owner=None, limit_bytes=limit_bytes, limit_files=limit_files)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    return tmp_path / "outside"


def test_a_file_is_written_read_and_replaced(tmp_path: Path) -> None:
    files = scratch(tmp_path / "work")

    files.write("a/b/c", b"one")
    files.write("a/b/c", b"two")

    assert files.read("a/b/c") == b"two"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../outside/secret", "a/../../outside/secret", "."])
def test_a_path_outside_is_refused(tmp_path: Path, outside: Path, path: str) -> None:
    files = scratch(tmp_path / "work")

    with pytest.raises(SandboxError, match="not a path in the sandbox"):
        files.read(path)
    with pytest.raises(SandboxError, match="not a path in the sandbox"):
        files.write(path, b"x")


def test_links_are_never_followed(tmp_path: Path, outside: Path) -> None:
    files = scratch(tmp_path / "work")
    (tmp_path / "work" / "file").symlink_to(outside / "secret")
    (tmp_path / "work" / "folder").symlink_to(outside)

    for path in ("file", "folder/secret"):
        with pytest.raises(SandboxError):
            files.read(path)
        with pytest.raises(SandboxError):
            files.write(path, b"changed")
    files.snapshot()
    files.clear()

    assert (outside / "secret").read_text() == "secret"
    assert list((tmp_path / "work").iterdir()) == []


def test_reading_a_fifo_does_not_wait(tmp_path: Path) -> None:
    files = scratch(tmp_path / "work")
    os.mkfifo(tmp_path / "work" / "fifo")

    with pytest.raises(SandboxError, match="not a regular file"):
        files.read("fifo")


def test_a_snapshot_holds_regular_files_and_folders_and_counts_the_rest(tmp_path: Path, outside: Path) -> None:
    work = tmp_path / "work"
    files = scratch(work)
    files.write("folder/file", b"content")
    (work / "link").symlink_to(outside)
    os.mkfifo(work / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(work / "socket"))
    (work / "empty").mkdir()
    (work / "program").write_text("x")
    (work / "program").chmod(0o4755)
    (work / "odd\nname").write_text("y")

    snapshot = files.snapshot()
    other = scratch(tmp_path / "other")
    other.write("old", b"")
    other.restore(snapshot.data)

    assert snapshot.left_out == 4
    names = sorted(str(each.relative_to(tmp_path / "other")) for each in (tmp_path / "other").rglob("*"))
    assert names == ["empty", "folder", "folder/file", "odd\nname", "program"]
    assert (tmp_path / "other" / "program").stat().st_mode & 0o7777 == 0o755


def test_a_sparse_file_counts_with_its_whole_size(tmp_path: Path) -> None:
    files = scratch(tmp_path / "work")
    with (tmp_path / "work" / "sparse").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(SandboxError, match="too large: 1,099,511,627,776 bytes"):
        files.snapshot()
    with pytest.raises(SandboxError, match="too large"):
        files.read("sparse")


@pytest.mark.parametrize("name", ["../outside/new", "/tmp/tidemill-new", "a/../../outside/new"])
def test_a_snapshot_with_a_path_outside_is_refused(tmp_path: Path, outside: Path, name: str) -> None:
    with pytest.raises(SandboxError, match="not a path in the sandbox"):
        scratch(tmp_path / "work").restore(archive(name))

    assert not (outside / "new").exists()


def test_a_link_in_a_snapshot_is_left_out(tmp_path: Path, outside: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)

    scratch(tmp_path / "work").restore(archive(link, "link/new"))

    assert not (outside / "new").exists()
    assert (tmp_path / "work" / "link" / "new").read_bytes() == b"new"


def test_a_snapshot_that_is_too_large_or_damaged_changes_nothing(tmp_path: Path) -> None:
    files = scratch(tmp_path / "work", limit_bytes=100)
    files.write("kept", b"x")

    with pytest.raises(SandboxError, match="too large"):
        files.restore(archive(*(f"{number}" for number in range(60))))
    with pytest.raises(SandboxError, match="damaged"):
        files.restore(b"not an archive")

    assert files.read("kept") == b"x"


def test_a_deep_tree_is_deleted(tmp_path: Path) -> None:
    files = scratch(tmp_path / "work")
    folder = os.open(tmp_path / "work", os.O_RDONLY)
    for _ in range(50):
        os.mkdir("x" * 200, dir_fd=folder)
        below = os.open("x" * 200, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)

    files.clear()

    assert list((tmp_path / "work").iterdir()) == []


def archive(*entries: str | tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for each in entries:
            entry = tarfile.TarInfo(each) if isinstance(each, str) else each
            content = b"new" if entry.isfile() else b""
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
