"""Check the pages: links, titles, navigation, commands, keys and code blocks. `make check-docs`.

    python -m scripts.site.check

Prints one finding a line, `docs/page.md:12: what; hint`, and exits with 1 if there are any.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.site import api, configuration
from scripts.site.blocks import Block, UnclosedBlockError, code_blocks
from scripts.site.names import Names
from scripts.site.navigation import ALL, listed
from scripts.site.notebooks import problems_of
from scripts.site.pages import INLINE_CODE, ROOT, Link, Page
from scripts.site.stage import PROJECT, README, page_of
from tidemill.config.keys import did_you_mean

MOST_BYTES = 15 * 1024
NO_LIMIT = "reference/"  # folder of pages of any size
TUTORIALS = "tutorials/"  # their cells run as notebooks
EXECUTED = ("python", "bash", "toml")
SHELLS = ("bash", "sh", "shell", "console")
GENERATED = ("explore/tables/",)
"""Files below docs/ that `make docs` writes."""
FOUND_IN_SHELL = re.compile(r"(?:^|&&|\|\||[;|(])\s*(?:\$\s+)?(?P<command>[^;&|()]+)")
ASSIGNMENT = re.compile(r"^[A-Z_]+=\S*\s+")
HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(?P<end>\w+)")
LIST_ITEM = re.compile(r"^(?:[-*+]|\d+[.)])\s")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    path: str
    line: int
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}; {self.hint}"


class Documentation:
    """The README and docs/ of a checkout."""

    def __init__(self, root: Path, names: Names) -> None:
        self.root = root
        self.names = names
        self.docs = root / "docs"

    @cached_property
    def pages(self) -> dict[str, Page]:
        """By path from the root of the repository."""
        paths = [self.root / README, *sorted(self.docs.rglob("*.md"))]
        return {path.relative_to(self.root).as_posix(): Page.read(path) for path in paths if path.is_file()}

    @cached_property
    def generated(self) -> Mapping[str, frozenset[str]]:
        """The anchors of the pages that `make docs` adds, by path."""
        anchors: dict[str, set[str]] = {f"docs/{name}": set() for name in configuration.names()}
        for target in configuration.anchors().values():
            page, _, anchor = target.partition("#")
            anchors[f"docs/{page}"].add(anchor)
        for page, public in api.names().items():
            anchors[f"docs/{page}"] = {f"tidemill.{name}" for name in public}
        return {path: frozenset(found) for path, found in anchors.items()}

    def findings(self) -> list[Finding]:
        checks: tuple[Callable[[str, Page], Iterator[Finding]], ...] = (
            self.title,
            self.size,
            self.links,
            self.lists,
            self.names_in_text,
            self.blocks,
        )
        found = [finding for path, page in self.pages.items() for check in checks for finding in check(path, page)]
        return sorted({*found, *self.navigation()})

    def title(self, path: str, page: Page) -> Iterator[Finding]:
        titles = [heading for heading in page.headings if heading.level == 1]
        if not titles:
            yield Finding(path, 1, "the page has no title", "begin it with `# Title`")
        for second in titles[1:]:
            yield Finding(path, second.line, f"a second title, {second.text!r}", "write `##` for its sections")

    def size(self, path: str, page: Page) -> Iterator[Finding]:
        size = len(page.text.encode())
        if path.startswith("docs/") and not path.startswith(f"docs/{NO_LIMIT}") and size > MOST_BYTES:
            hint = f"split it: pages outside docs/{NO_LIMIT} have at most {MOST_BYTES // 1024} KB"
            yield Finding(path, 1, f"the page has {size / 1024:.1f} KB", hint)

    def navigation(self) -> Iterator[Finding]:
        """Pages that the navigation lacks, and pages of it that do not exist."""
        file = self.root / "zensical.toml"
        text = file.read_text(encoding="utf-8")
        listed_pages = list(listed(tomllib.loads(text)["project"]["nav"]))
        known = {path.removeprefix("docs/") for path in self.pages if path.startswith("docs/")}
        for name in sorted(known - set(listed_pages)):
            yield Finding(f"docs/{name}", 1, "the page is not in the navigation", f"add it to nav in {file.name}")
        for name in listed_pages:
            if name.endswith(ALL) or name in known:
                continue
            line = 1 + text[: text.find(f'"{name}"')].count("\n")
            yield Finding(file.name, line, f"docs/{name} does not exist", "remove it from nav, or write the page")

    def links(self, path: str, page: Page) -> Iterator[Finding]:
        for link in page.links:
            if not link.is_external and (problem := self.broken(path, link)):
                yield Finding(path, link.line, *problem)

    def broken(self, path: str, link: Link) -> tuple[str, str] | None:
        """What is wrong with a relative link, and a hint."""
        if link.target.startswith("/"):
            return f"{link.target} is an absolute link", "write the path from this page"
        target = os.path.normpath(Path(path).parent / link.path) if link.path else path
        if target.startswith("..") or any(target.startswith(f"docs/{folder}") for folder in GENERATED):
            return None if not target.startswith("..") else (f"{link.target} is outside of the repository", "remove it")
        anchors = self.anchors(target)
        if anchors is None:
            if (self.root / target).exists():
                return None
            every = {*self.pages, *self.generated, *PROJECT}
            moved = [page for page in every if Path(page).name == Path(target).name != "index.md"]
            near = f"did you mean {os.path.relpath(min(moved), Path(path).parent)}?" if moved else "correct the path"
            return f"{link.target} does not exist", near
        if link.anchor and link.anchor not in anchors:
            hint = did_you_mean(link.anchor, anchors) or "take the anchor from a heading of that page"
            return f"{link.path or 'this page'} has no heading #{link.anchor}", hint
        return None

    def anchors(self, path: str) -> frozenset[str] | None:
        """Of a page of the documentation or of the repository; None: there is no such page."""
        if path in self.generated:
            return self.generated[path]
        if path in self.pages:
            return self.pages[path].anchors
        known = path in PROJECT or page_of(path) in PROJECT.values()
        source = next((source for source, name in PROJECT.items() if f"docs/{name}" == path), path)
        if known and (self.root / source).is_file():
            return Page.read(self.root / source).anchors
        return None

    def lists(self, path: str, page: Page) -> Iterator[Finding]:
        """A list without a blank line before it is a paragraph on the site, and a list on a forge."""
        before = ""
        for number, line in enumerate(page.prose, 1):
            begins = LIST_ITEM.match(line) and before and not LIST_ITEM.match(before) and not before.startswith(" ")
            if begins and not before.lstrip().startswith(("#", "<", "|")):
                yield Finding(path, number, "a list begins within a paragraph", "add a blank line before it")
            before = "in a list" if LIST_ITEM.match(line) else line
            if LIST_ITEM.match(line):
                before = "- "

    def names_in_text(self, path: str, page: Page) -> Iterator[Finding]:
        """Commands, recipes, targets and keys in inline code."""
        for number, line in enumerate(page.prose, 1):
            for code in INLINE_CODE.finditer(line):
                for what, hint in self.names.problems(code["code"].strip()):
                    yield Finding(path, number, what, hint)

    def blocks(self, path: str, page: Page) -> Iterator[Finding]:
        try:
            found = code_blocks(page.path)
        except UnclosedBlockError as error:
            yield Finding(path, error.line, "the code block has no end", "add the closing fence")
            return
        for block in found:
            yield from self.block(path, block)

    def block(self, path: str, block: Block) -> Iterator[Finding]:
        reason_hint = "write <!-- not run: REASON --> on the line before it"
        if not block.language:
            yield Finding(path, block.line, "the code block names no language", "write ```text for output and drawings")
        elif block.language not in (*EXECUTED, "text") and not (block.reason or block.title):
            yield Finding(path, block.line, f"nothing runs this block of {block.language}", reason_hint)
        if block.language in SHELLS:
            for number, command in shell_commands(block):
                for what, hint in self.names.problems(command):
                    yield Finding(path, number, what, hint)
                program = command.split()[0]
                is_run = block.reason or program in RUN_PROGRAMS or path.startswith(f"docs/{TUTORIALS}")
                if block.language == "bash" and not is_run:
                    yield Finding(path, number, f"no test runs the command {program}", reason_hint)
        if block.language == "toml" and not block.reason:
            for offset, what, hint in self.names.toml_problems(block.text):
                yield Finding(path, block.line + offset, what, hint)


RUN_PROGRAMS = ("tidemill", "cd", "cat", "echo", "mkdir")
"""Programs whose commands the tests of the pages run."""


def shell_commands(block: Block) -> Iterator[tuple[int, str]]:
    """The commands of a block of a shell, with their lines; continued lines are joined."""
    number = block.line
    lines = iter(block.text.splitlines())
    for line in lines:
        number += 1
        first, whole = number, line
        while whole.endswith("\\"):
            number += 1
            whole = f"{whole[:-1]} {next(lines, '').strip()}"
        if block.language == "console" and not whole.startswith("$"):
            continue
        if document := HERE_DOCUMENT.search(whole):
            for inside in lines:
                number += 1
                if inside.strip() == document["end"]:
                    break
        whole = re.sub(r"(?:^|\s)#.*", "", whole)
        for found in FOUND_IN_SHELL.finditer(re.sub(r"'[^']*'|\"[^\"]*\"", quoted, whole)):
            command = found["command"].replace("\0", " ").strip()
            while assignment := ASSIGNMENT.match(command):
                command = command[assignment.end() :]
            if command:
                yield first, command


def quoted(text: re.Match[str]) -> str:
    """A quoted word without characters that separate commands."""
    return re.sub(r"[;&|()\s]", "\0", text[0])


def notebook_problems(root: Path) -> Iterator[str]:
    """Pages of tutorials whose notebook has other cells."""
    for page in sorted((root / "docs" / "tutorials").glob("*.md")):
        if page.name != "index.md":
            yield from (str(problem).removeprefix(f"{root}/") for problem in problems_of(page))


def check(root: Path, names: Names) -> list[str]:
    return [*map(str, Documentation(root, names).findings()), *notebook_problems(root)]


def main() -> int:
    problems = check(ROOT, Names.of_this_version(ROOT))
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
