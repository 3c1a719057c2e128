"""Notebooks of the tutorials. The page `docs/tutorials/NAME.md` is the source of `docs/tutorials/NAME.ipynb`.

    python -m scripts.site.notebooks [NAME ...] [--execute | --check]

A block of python is a code cell, a block of bash a cell of shell commands; everything else is text. A block behind
`<!-- not run: REASON -->` is text, too. `<!-- picture: TEXT -->` before a block describes the picture that it draws.

Without --execute the outputs of the committed notebook are kept up to the first cell of code that has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
SHELL = "%%bash -e\n"
FENCE = re.compile(r"(`{3,})\s*(\w*)")
NOTE = re.compile(r'^!!! \w+(?: "(.*)")?((?:\n+ {4}.*)+)', re.MULTILINE)
PICTURE = re.compile(r"<!-- picture: (.*?) -->\s*$", re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .*-->\s*$")
MAX_PICTURE_BYTES = 60_000
Notebook = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A part of a page. `kind` is markdown, python or bash; lines count from 1 and include the fences of code."""

    kind: str
    source: str
    first_line: int
    last_line: int
    picture: str = ""


def cells_of(page: str) -> list[Cell]:
    """The cells of a page, without its front matter."""
    cells: list[Cell] = []
    lines = page.splitlines()
    text_from = number = _front_matter_end(lines)
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        ticks, language = fence.groups()
        end = next((at for at in range(number + 1, len(lines)) if lines[at].rstrip() == ticks), len(lines) - 1)
        before = "\n".join(lines[text_from:number])
        if language in ("python", "bash") and not NOT_RUN.search(before):
            cells += _text(before, text_from)
            picture = PICTURE.search(before)
            code = "\n".join(lines[number + 1 : end])
            alt = " ".join(picture[1].split()) if picture else ""
            cells.append(Cell(kind=language, source=code, first_line=number + 1, last_line=end + 1, picture=alt))
            text_from = end + 1
        number = end + 1
    return cells + _text("\n".join(lines[text_from:]), text_from)


def settings_of(page: str) -> dict[str, Any]:
    """The key `tutorial` of the front matter: `threads` for its execution."""
    lines = page.splitlines()
    front_matter = yaml.safe_load("\n".join(lines[1 : max(0, _front_matter_end(lines) - 1)])) or {}
    return dict(front_matter.get("tutorial", {}))


def write_notebook(md: Path) -> Notebook:
    """The notebook of a page, without outputs; the id of a cell depends on its text only."""
    seen: dict[str, int] = {}
    cells: list[dict[str, Any]] = []
    for cell in cells_of(md.read_text(encoding="utf-8")):
        source = SHELL + cell.source if cell.kind == "bash" else cell.source
        digest = hashlib.sha256(source.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        name = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        common: dict[str, Any] = {"id": name, "metadata": {}, "source": source.splitlines(keepends=True)}
        if cell.kind == "markdown":
            cells.append({"cell_type": "markdown", **common})
        else:
            cells.append({"cell_type": "code", **common, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def keep_outputs(notebook: Notebook, committed: Notebook) -> None:
    """Copy outputs of an earlier notebook, up to the first cell of code that has changed."""
    for new, old in zip(_code(notebook), _code(committed), strict=False):
        if new["source"] != old["source"]:
            return
        new |= {"outputs": old["outputs"], "execution_count": old["execution_count"]}


def problems_of(md: Path) -> Iterator[str]:
    """Differences between a page and its committed notebook, as `page:line: what; hint`."""
    path = md.with_suffix(".ipynb")
    command = f"python -m scripts.site.notebooks {md.stem}"
    if not path.is_file():
        yield f"{md}:1: the page has no notebook; {command} --execute"
        return
    committed, notebook = json.loads(path.read_text(encoding="utf-8")), write_notebook(md)
    old_cells = committed["cells"]
    for at, (cell, new) in enumerate(zip(cells_of(md.read_text(encoding="utf-8")), notebook["cells"], strict=True)):
        old = old_cells[at] if at < len(old_cells) else {}
        if any(new[key] != old.get(key) for key in ("cell_type", "id", "source")):
            yield f"{md}:{cell.first_line}: the notebook has another cell here; {command} --execute"
            return
        if cell.kind != "markdown" and old["execution_count"] is None:
            yield f"{md}:{cell.first_line}: the notebook has no output of this cell; {command} --execute"
            return
    if len(old_cells) > len(notebook["cells"]):
        yield f"{md}:1: the notebook has cells behind those of the page; {command}"


def page_with_outputs(md_path: Path, ipynb_path: Path) -> str:
    """The page with the outputs of its notebook, each below its block: text, tables, and pictures as data URIs.

    Raises:
        ValueError: the notebook is not that of the page, or a picture has more than `MAX_PICTURE_BYTES`.
    """
    page = md_path.read_text(encoding="utf-8")
    lines, notebook = page.splitlines(), json.loads(ipynb_path.read_text(encoding="utf-8"))
    cells = [cell for cell in cells_of(page) if cell.kind != "markdown"]
    outputs = [code["outputs"] for code in _code(notebook)]
    if len(cells) != len(outputs):
        raise ValueError(f"{ipynb_path} has {len(outputs)} cells of code, {md_path} {len(cells)}")
    for cell, shown in reversed(list(zip(cells, outputs, strict=True))):
        below = [part for output in shown if (part := _on_page(output, cell, md_path))]
        lines[cell.last_line : cell.last_line] = [line for part in below for line in ("", *part.splitlines())]
    return "\n".join(lines) + "\n"


def _on_page(output: dict[str, Any], cell: Cell, md: Path) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        encoded = "".join(data["image/png"]).replace("\n", "")
        if len(encoded) > MAX_PICTURE_BYTES:
            raise ValueError(
                f"{md}:{cell.first_line}: the picture has {len(encoded)} bytes, {MAX_PICTURE_BYTES} at most"
            )
        return f'<img alt="{html.escape(cell.picture or "Output")}" src="data:image/png;base64,{encoded}">'
    text = "".join(data.get("text/html", ""))
    if "<table" in text:
        return text.strip()
    if text:  # the panel of a run
        plain = html.unescape(re.sub(r"<[^>]*>", "", text))
    else:
        plain = "".join(output.get("text", data.get("text/plain", "")))
    plain = "\n".join(line.rstrip() for line in plain.strip("\n").splitlines())
    return f"```text\n{plain}\n```" if plain.strip() else ""


def _front_matter_end(lines: Sequence[str]) -> int:
    """The index of the first line behind the front matter."""
    return lines.index("---", 1) + 1 if lines and lines[0] == "---" and "---" in lines[1:] else 0


def _text(text: str, before: int) -> list[Cell]:
    """At most one cell of text that starts after `before` lines; notes become quotations, which notebooks can show."""
    if not text.strip():
        return []
    first = before + len(text) - len(text.lstrip("\n")) + 1
    source = NOTE.sub(_quotation, text.strip("\n"))
    return [
        Cell(kind="markdown", source=source, first_line=first, last_line=before + text.rstrip("\n").count("\n") + 1)
    ]


def _quotation(note: re.Match[str]) -> str:
    lines = (line.removeprefix("    ") for line in note[2].splitlines())
    return "\n".join([f"> **{note[1] or 'Note'}**", *(f"> {line}".rstrip() for line in lines)])


def _code(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.site.notebooks", description="Notebooks of the tutorials")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tutorials (default: all)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--execute", action="store_true", help="also execute them, and store their outputs")
    mode.add_argument("--check", action="store_true", help="compare the committed notebooks with the pages")
    given = parser.parse_args(argv)
    names = given.names or [path.stem for path in sorted(TUTORIALS.glob("*.md")) if path.stem != "index"]
    pages = [TUTORIALS / f"{name}.md" for name in names]
    if given.check:
        problems = [problem for md in pages for problem in problems_of(md)]
        sys.stderr.writelines(f"{problem}\n" for problem in problems)
        return 1 if problems else 0
    for md in pages:
        notebook, path = write_notebook(md), md.with_suffix(".ipynb")
        if given.execute:
            from scripts.site.notebook_execution import execute

            done = execute(notebook, **settings_of(md.read_text(encoding="utf-8")))
            print(f"{md.stem}: {done.wall_s:.0f} s, {done.cpu_s:.0f} s of CPU time")
        elif path.is_file():
            keep_outputs(notebook, json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"wrote {path.relative_to(Path.cwd())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
