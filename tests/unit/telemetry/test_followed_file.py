from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.telemetry import followed_file
from tidemill.telemetry.followed_file import FollowedFile


def lines_of(file: FollowedFile) -> tuple[list[int | None], bool]:
    """The new steps, after the last reset of this reading, and whether there was one."""
    steps, reset = list[int | None](), False
    for lines, replaced in file.new_lines():
        reset |= replaced
        steps = ([] if replaced else steps) + [line["step"] if line else None for line in lines]
    return steps, reset


def text(*steps: int, life: int = 1) -> str:
    return "".join(f'{{"step":{step},"life":{life}}}\n' for step in steps)


def test_only_new_complete_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    file = FollowedFile(path)
    assert lines_of(file) == ([], False), "a missing file has no lines"
    path.write_text(text(1, 2) + '{"st')
    assert lines_of(file) == ([1, 2], False)
    assert lines_of(file) == ([], False)
    with path.open("a") as log:
        log.write('ep":3}\nnot json\n[4]\n')
    assert lines_of(file) == ([3, None, None], False)
    assert (file.lines, file.unreadable) == (5, 2)


@pytest.mark.parametrize("block", [1, 20, 1 << 20])
def test_lines_longer_than_a_block_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(followed_file, "BLOCK_BYTES", block)
    path = tmp_path / "log.jsonl"
    path.write_text('{"step":1,"text":"' + "x" * 50 + '"}\n' + text(2, 3))
    file = FollowedFile(path)
    assert lines_of(file) == ([1, 2, 3], False)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_text(text(1, 2, 3, 4, 5))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (lambda path: path.write_text(text(1)), [1]),
        (lambda path: path.write_text(text(1, life=1) + text(2, 3, 4, 5, life=2)), [1, 2, 3, 4, 5]),
        (replaced, [1, 2, 3, 4, 5]),
        (Path.unlink, []),
        (lambda path: os.truncate(path, 0), []),
    ],
    ids=["shorter", "grown past the old place", "another inode", "deleted", "empty"],
)
def test_another_history_starts_over_without_a_generation(
    tmp_path: Path, change: Callable[[Path], None], steps: list[int]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text(1, 2, 3))
    file = FollowedFile(path)
    assert lines_of(file) == ([1, 2, 3], False)
    change(path)
    assert lines_of(file) == (steps, True)
    assert lines_of(file) == ([], False) and file.replaced == 1


def test_what_is_read_while_the_history_is_replaced_is_discarded(tmp_path: Path) -> None:
    path, generation = tmp_path / "log.jsonl", 0

    def read_generation() -> int:
        nonlocal generation
        if rewind_now:
            rewind_now.pop()
            generation += 2
            path.write_text(text(1, 7, 8, 9))  # after the block was read
        return generation

    rewind_now = list[bool]()
    path.write_text(text(1, 2))
    file = FollowedFile(path, read_generation)
    assert lines_of(file) == ([1, 2], False)
    with path.open("a") as log:
        log.write(text(3))
    rewind_now.append(True)
    assert lines_of(file) == ([1, 7, 8, 9], True)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    assert lines_of(FollowedFile(tmp_path / "log.jsonl")) == ([], False)
