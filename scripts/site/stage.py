"""The pages of the site: docs/ with generated pages, links between keys, and links that stay within the site."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from scripts.site import api, configuration
from scripts.site.notebooks import page_with_outputs
from scripts.site.pages import DOCS, EXTERNAL, HEADING, INLINE_CODE, ROOT, Page, front_matter

PROJECT = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
}
"""Pages from the root of the repository, with their names on the site."""
README = "README.md"
HOME = "index.md"
TUTORIALS = "tutorials"
TABLES = "explore/tables"
ANY_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<target>[^\s()<>]+)(?P<title>\s+\"[^\"]*\")?\)")
REASON_LINE = re.compile(r"^[ \t]*<!--\s*not run:.*?-->[ \t]*\n", re.MULTILINE)


def generated_pages() -> dict[str, str]:
    """Configuration and API reference, and the project's pages."""
    project = {
        name: (ROOT / source).read_text(encoding="utf-8")
        for source, name in PROJECT.items()
        if (ROOT / source).is_file()
    }
    pages = configuration.pages() | api.pages()
    return pages | {name: within_site(text, name, source_of(name)) for name, text in project.items()}


def generated_names() -> list[str]:
    """Names of the pages that are not in docs/, in the order of the navigation."""
    return list(generated_pages())


def source_of(name: str) -> str:
    """The path of a page in the repository."""
    return next((source for source, page in PROJECT.items() if page == name), f"docs/{name}")


def stage(folder: Path) -> list[str]:
    """Write all pages and what belongs to them; returns the names of the generated ones."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(folder.rglob("*.md")):
        name = path.relative_to(folder).as_posix()
        text = tutorial(DOCS / name) if name.startswith(f"{TUTORIALS}/") else path.read_text(encoding="utf-8")
        text = with_description(REASON_LINE.sub("", text))
        path.write_text(with_key_links(within_site(text, name, f"docs/{name}"), name), encoding="utf-8")
    generated = generated_pages()
    for name, text in generated.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    from scripts.site.explorations import write_tables  # with torch, which the check of the pages does not need

    write_tables(folder / TABLES)
    return list(generated)


def tutorial(page: Path) -> str:
    """A page with the outputs of its notebook, if it has one."""
    notebook = page.with_suffix(".ipynb")
    return page_with_outputs(page, notebook) if notebook.is_file() else page.read_text(encoding="utf-8")


def with_description(text: str) -> str:
    """A page with its first sentence as the description that search engines show, if it names none itself."""
    page = Page(Path(), text)
    if "description" in page.front_matter or not page.first_sentence:
        return text
    start, description, *_ = front_matter(page.first_sentence)
    if page.front_matter:
        return "\n".join([start, description, *page.lines[1:]]) + "\n"
    return "\n".join([*front_matter(page.first_sentence), text])


def within_site(text: str, name: str, source: str) -> str:
    """A page whose links to files of the repository lead to pages of the site; links to other files become text."""
    folder = PurePosixPath(source).parent

    def change(link: re.Match[str]) -> str:
        target = link["target"]
        if EXTERNAL.match(target) or target.startswith("#"):
            return link[0]
        path, mark, anchor = target.partition("#")
        file = os.path.normpath(folder / path)
        page = page_of(file)
        if page is None:
            return link["text"][1:-1] if not link["text"].startswith("!") else link[0]
        relative = os.path.relpath(page, PurePosixPath(name).parent)
        if file == README:  # its sections are not those of the first page
            return f"{link['text']}({relative}{link['title'] or ''})"
        return f"{link['text']}({relative}{mark}{anchor}{link['title'] or ''})"

    return outside_blocks(text, lambda line: ANY_LINK.sub(change, line))


def page_of(file: str) -> str | None:
    """The name on the site of a file of the repository; None: it is not part of the site."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return HOME if file == README else PROJECT.get(file)


def with_key_links(text: str, name: str) -> str:
    """A page in which a key of the configuration, as code, is a link to its description."""
    folder = PurePosixPath(name).parent
    targets: Mapping[str, str] = configuration.anchors()

    def change(line: str) -> str:
        if HEADING.match(line):
            return line
        linked = [found.span() for found in re.finditer(r"\[[^\]]*\]", line)]

        def code(found: re.Match[str]) -> str:
            key = found["code"].removeprefix("--").partition(" = ")[0]
            target = targets.get(key) if "." in key else None
            inside = any(start < found.start() < end for start, end in linked)
            if target is None or inside or found[1] != "`":
                return found[0]
            return f"[{found[0]}]({os.path.relpath(target, folder)})"

        return INLINE_CODE.sub(code, line)

    return outside_blocks(text, change)


def outside_blocks(text: str, change: Callable[[str], str]) -> str:
    """A page with a change of its lines outside of code blocks, comments and front matter."""
    page = Page(Path(), text)
    lines = [change(line) if prose else line for line, prose in zip(page.lines, page.prose, strict=False)]
    return "\n".join(lines) + "\n"
