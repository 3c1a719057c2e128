from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.core.errors import UserError
from tidemill.telemetry.jsonl import (
    JsonlWriter,
    SharedLines,
    disk_error,
    drop_torn_line,
    encode,
    finite_number,
    read_lines,
    write_atomically,
)


def test_a_line_has_no_line_break_and_no_nan() -> None:
    assert (
        encode({"text": "a\nb", "value": float("nan"), "up": float("inf")})
        == b'{"text":"a\\nb","value":null,"up":null}'
    )


def test_foreign_values_are_encoded_as_scalars_or_text() -> None:
    class Scalar:
        def item(self) -> float:
            return 0.5

    assert encode({"scalar": Scalar(), "path": Path("a/b")}) == b'{"scalar":0.5,"path":"a/b"}'


def test_written_lines_are_read_back_with_their_offsets(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "log.jsonl")
    writer.write({"n": 1})
    writer.write({"n": 22})
    writer.close()
    # '{"n":1}' and its line break are 8 bytes.
    assert list(read_lines(tmp_path / "log.jsonl")) == [(0, {"n": 1}), (8, {"n": 22})]


def test_incomplete_and_broken_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\nnot json\n[1]\n\xff\xfe\n' + b'\n{"n":2}\n{"n":3')
    assert [line["n"] for _, line in read_lines(path)] == [1, 2]


@pytest.mark.parametrize(("last_bytes", "first"), [(0, 0), (1, 5), (9, 4), (15, 4), (16, 3), (1000, 0)])
def test_the_lines_that_begin_in_the_last_bytes(tmp_path: Path, last_bytes: int, first: int) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(b'{"n":%d}\n' % n for n in range(5)))  # of 8 bytes each
    found = list(read_lines(path, last_bytes=last_bytes))
    assert found == [(8 * n, {"n": n}) for n in range(first, 5)]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "absent.jsonl")) == []
    assert drop_torn_line(tmp_path / "absent.jsonl") == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"ab\n", b"ab\n"), (b"ab\ncd", b"ab\n"), (b"abcd", b""), (b"ab\n" + b"x" * 200_000, b"ab\n")],
)
def test_an_incomplete_last_line_is_removed(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(before)
    assert drop_torn_line(path) == len(before) - len(after)
    assert path.read_bytes() == after


def test_a_writer_replaces_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":')
    writer = JsonlWriter(path)
    writer.write({"n": 2})
    writer.close()
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n'


def disk_that_fills_after(free_bytes: int) -> Callable[[int, bytes], int]:
    """Like os.write on a full disk: takes what fits, then fails."""
    real_write, left = os.write, free_bytes

    def write(fd: int, data: bytes) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real_write(fd, data[:left])
        left -= taken
        return taken

    return write


@pytest.mark.parametrize("free_bytes", [0, 3])
def test_a_full_disk_is_reported_and_leaves_complete_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    path = tmp_path / "log.jsonl"
    writer = JsonlWriter(path)
    writer.write({"n": 1})
    monkeypatch.setattr(os, "write", disk_that_fills_after(free_bytes))
    with pytest.raises(UserError) as caught:
        writer.write({"n": 2})
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
    assert caught.value.where == str(path) and "resumes" in caught.value.hint
    monkeypatch.undo()
    assert path.read_bytes() == b'{"n":1}\n'
    writer.write({"n": 3})
    writer.close()
    assert path.read_bytes() == b'{"n":1}\n{"n":3}\n'


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        write_atomically(path, b"new")
    assert caught.value.where == str(path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_two_processes_replace_one_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"

    def replaced_by_another(_: int) -> None:
        monkeypatch.undo()
        write_atomically(path, b"of the other")
        assert path.read_bytes() == b"of the other"

    monkeypatch.setattr(os, "fsync", replaced_by_another)
    write_atomically(path, b"last")
    assert path.read_bytes() == b"last"
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize(
    ("code", "what"), [(errno.EDQUOT, "the disk is full"), (errno.EROFS, "not writable"), (errno.EIO, "Input/output")]
)
def test_disk_errors_are_translated(code: int, what: str) -> None:
    assert what in str(disk_error(OSError(code, os.strerror(code)), Path("x")))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((3, 3.0), (-0.5, -0.5), (0, 0.0), (True, None), ("3", None), (None, None), ([3], None), (1e308, 1e308)),
        *((float("nan"), None), (float("inf"), None)),
    ],
)
def test_only_finite_numbers_are_accepted(value: object, number: float | None) -> None:
    assert finite_number(value) == number


def test_processes_append_to_one_file_and_read_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    one, other = SharedLines(path), SharedLines(path)
    assert one.new_lines() == []
    one.append({"at": 1})
    assert other.new_lines() == [{"at": 1}]
    with path.open("ab") as file:
        file.write(b'{"at": 2')  # a process is killed, or still writing
    assert one.new_lines() == [{"at": 1}]
    assert other.new_lines() == []
    other.append({"at": 3})
    assert one.new_lines() == [None, {"at": 3}]
    path.write_bytes(b'{"at": 4}\n')  # replaced
    assert one.new_lines() == [{"at": 4}]


def test_a_line_that_does_not_fit_the_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        SharedLines(Path("/dev/full")).append({"at": 1})
