"""Code blocks of a page: what `make check-docs` asks for a reason, and what the tests of the pages run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$")
TITLE = re.compile(r"\btitle=\"(?P<name>[^\"]+)\"")
REASON = re.compile(r"^\s*<!--\s*not run:\s*(?P<reason>.*?)\s*-->\s*$")


class UnclosedBlockError(ValueError):
    """A code block has no end; the message begins with page and line."""

    def __init__(self, page: Path, line: int) -> None:
        super().__init__(f"{page}:{line}: the code block has no closing fence")
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced code block."""

    page: Path
    line: int
    """The line of the opening fence, from 1; the code begins on the next."""
    language: str
    """The first word after the fence; empty if there is none."""
    text: str
    """The code without the fence's indentation; ends with a newline unless it is empty."""
    title: str
    """The file that the block shows, from `title="NAME"` after the language; the tests write it for the page's other
    blocks. Empty if there is none."""
    reason: str
    """Why the block is not run: `<!-- not run: REASON -->` on the line before the fence; empty if it must run."""


def code_blocks(path: Path) -> list[Block]:
    """The fenced code blocks of a Markdown file, also those in lists and notes.

    Raises:
        UnclosedBlockError: a fence is never closed.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    for number, opening, end in fenced(lines):
        if end is None:
            raise UnclosedBlockError(path, number + 1)
        before = REASON.match(lines[number - 1]) if number else None
        code = [line.removeprefix(opening["indent"]) for line in lines[number + 1 : end]]
        words = opening["info"].split()
        title = TITLE.search(opening["info"])
        blocks.append(
            Block(
                page=path,
                line=number + 1,
                language=words[0] if words else "",
                text="".join(f"{line}\n" for line in code),
                title=title["name"] if title else "",
                reason=before["reason"] if before else "",
            )
        )
    return blocks


def fenced(lines: list[str]) -> Iterator[tuple[int, re.Match[str], int | None]]:
    """(index of the opening fence, what it says, index of the closing one or None) of each block."""
    number = 0
    while number < len(lines):
        if opening := FENCE.match(lines[number]):
            end = _closing_line(lines, number + 1, opening["marks"])
            yield number, opening, end
            number = len(lines) if end is None else end
        number += 1


def _closing_line(lines: list[str], first: int, marks: str) -> int | None:
    """The index of the line that closes a fence: the same character, at least as often."""
    for number in range(first, len(lines)):
        stripped = lines[number].strip()
        if len(stripped) >= len(marks) and set(stripped) == {marks[0]}:
            return number
    return None
