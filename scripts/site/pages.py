"""Pages as Markdown: title, headings with their anchors, links, and lines without code."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pymdownx.slugs import slugify

from scripts.site.blocks import fenced

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HEADING = re.compile(r"^(?P<marks>#{1,6})\s+(?P<text>.*?)(?:\s+#+)?\s*$")
ATTRIBUTES = re.compile(r"\s*\{:?\s*(?:#(?P<anchor>[^\s}]+))?[^}]*\}$")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?(?P<target>[^\s()<>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(?P<target>[^\s<>]+)>?")
RAW = re.compile(r"<(?:a|img|script|link)\b[^>]*?\b(?:href|src)=\"(?P<target>[^\"]+)\"")
IDENTIFIED = re.compile(r"<[a-z][^>]*?\b(?:id|name)=\"(?P<anchor>[^\"]+)\"")
INLINE_CODE = re.compile(r"(`+)(?P<code>.+?)(?<!`)\1(?!`)")
MARKUP = re.compile(r"!?\[(?P<text>[^\]]*)\]\([^)]*\)|<[^>]+>|[*`]")
EXTERNAL = re.compile(r"^(?:[a-z][a-z+.-]*:|//)", re.IGNORECASE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_slug = slugify(case="lower")


@dataclass(frozen=True, slots=True)
class Heading:
    line: int
    level: int
    text: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Link:
    line: int
    target: str

    @property
    def is_external(self) -> bool:
        return EXTERNAL.match(self.target) is not None

    @property
    def path(self) -> str:
        """Without the anchor."""
        return self.target.partition("#")[0]

    @property
    def anchor(self) -> str:
        return self.target.partition("#")[2]


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path, path.read_text(encoding="utf-8"))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def front_matter(self) -> dict[str, Any]:
        """The YAML between two lines of dashes at the start of the file."""
        end = self._front_matter_end
        return (yaml.safe_load("\n".join(self.lines[1:end])) or {}) if end else {}

    @property
    def _front_matter_end(self) -> int:
        """The index of the line that ends the front matter; 0: there is none."""
        if not self.lines or self.lines[0] != "---":
            return 0
        return next((number for number, line in enumerate(self.lines[1:], 1) if line == "---"), 0)

    @cached_property
    def prose(self) -> list[str]:
        """The lines; those of code blocks, comments and front matter are empty."""
        text = COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), self.text)
        lines = text.splitlines()
        end = self._front_matter_end
        if end:
            lines[: end + 1] = [""] * (end + 1)
        for first, _, last in fenced(lines):
            end = len(lines) if last is None else last + 1
            lines[first:end] = [""] * (end - first)
        return lines

    @cached_property
    def headings(self) -> list[Heading]:
        headings: list[Heading] = []
        taken = Counter[str]()
        for number, line in enumerate(self.prose, 1):
            heading = HEADING.match(line)
            if heading is None:
                continue
            attributes = ATTRIBUTES.search(heading["text"])
            text = plain(ATTRIBUTES.sub("", heading["text"]))
            anchor = slug = _slug(text, "-")
            if taken[slug]:  # as Python-Markdown numbers equal headings
                anchor = f"{slug}_{taken[slug]}"
            taken[slug] += 1
            if attributes and attributes["anchor"]:
                anchor = attributes["anchor"]
            headings.append(Heading(number, len(heading["marks"]), text, anchor))
        return headings

    @property
    def title(self) -> str:
        """The text of the first heading of level 1; empty if there is none."""
        return next((heading.text for heading in self.headings if heading.level == 1), "")

    @cached_property
    def first_sentence(self) -> str:
        """Of the paragraph below the title; empty if something else is there."""
        lines = iter(self.prose)
        next((line for line in lines if HEADING.match(line)), None)
        paragraph = list[str]()
        for line in lines:
            if line and (HEADING.match(line) or line.startswith(("|", "<", "- ", "!", ">", ":"))):
                break
            if line:
                paragraph.append(line)
            elif paragraph:
                break
        return re.split(r"(?<=\.)\s", plain(" ".join(paragraph)), maxsplit=1)[0]

    @cached_property
    def anchors(self) -> frozenset[str]:
        raw = {found["anchor"] for line in self.prose for found in IDENTIFIED.finditer(line)}
        return frozenset({heading.anchor for heading in self.headings} | raw)

    @cached_property
    def links(self) -> list[Link]:
        links = list[Link]()
        for number, line in enumerate(self.prose, 1):
            visible = INLINE_CODE.sub(lambda code: " " * len(code[0]), line)
            for pattern in (LINK, REFERENCE, RAW):
                links += [Link(number, found["target"]) for found in pattern.finditer(visible)]
            # The picture in a link: [![text](picture)](target)
            links += [Link(number, found) for found in re.findall(r"\[!\[[^\]]*\]\([^)]*\)\]\(([^)\s]+)\)", visible)]
        return links


def front_matter(description: str) -> list[str]:
    """The first lines of a generated page."""
    return ["---", f"description: {json.dumps(description)}", "---", ""]


def plain(text: str) -> str:
    """Text of a heading without emphasis, code marks and link targets."""
    return MARKUP.sub(lambda mark: mark["text"] or "", text).strip()
