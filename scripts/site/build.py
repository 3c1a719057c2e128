"""Build the documentation site: `make docs`.

    python -m scripts.site.build [--draft]

Stages docs/ with generated pages in build/site/pages, and runs the generator (Zensical) into build/site/html. The site
opens from file:// and from any static server, and loads nothing from elsewhere. A broken link is an error; with --draft
it is only a warning.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit

from scripts.site import search_index
from scripts.site.navigation import existing, expanded, listed
from scripts.site.pages import ROOT
from scripts.site.stage import stage

CONFIG = ROOT / "zensical.toml"
THEME = Path(__file__).with_name("theme")
SITE = ROOT / "build" / "site"
DEADLINE_S = 300.0
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def main() -> int:
    started = time.monotonic()
    draft = "--draft" in sys.argv[1:]
    try:
        messages = build(SITE, strict=not draft)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    if draft:
        print(messages)
    pages = len(list((SITE / "html").rglob("*.html")))
    print(f"{pages} pages in {time.monotonic() - started:.0f} s; open {SITE / 'html' / 'index.html'}")
    return 0


class BuildError(Exception):
    """The generator failed; the text is what it wrote."""


def build(site: Path, *, strict: bool = True) -> str:
    """Build the site in a folder; returns the messages of the generator.

    Args:
        strict: whether a broken link is an error.

    Raises:
        BuildError: the generator failed.
    """
    site.mkdir(parents=True, exist_ok=True)
    generated = stage(site / "pages")
    navigation = write_config(site, generated, strict=strict)
    shutil.rmtree(site / "html", ignore_errors=True)
    # The cache does not know about docstrings: --clean.
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--config-file", str(site / "zensical.toml")]
    done = subprocess.run(command, cwd=site, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    output, _, trace = done.stderr.partition("Traceback")
    messages = COLOR.sub("", f"{done.stdout}{output}{trace.strip().rpartition(chr(10))[2]}").strip()
    if done.returncode:
        raise BuildError(messages)
    html = site / "html"
    found = html / "search.json"
    search_index.write_index(
        found, site / "pages", dict(search_index.groups(navigation)), html / "assets" / "search-index.js"
    )
    for unused in (*html.glob("search.js*"), *(html / "assets" / "javascripts" / "workers").glob("*")):
        unused.unlink()
    return messages


def write_config(site: Path, generated: Sequence[str], *, strict: bool) -> list[Any]:
    """Write the generator's configuration; returns the navigation."""
    config = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    project = config["project"]
    names = frozenset(path.relative_to(site / "pages").as_posix() for path in (site / "pages").rglob("*.md"))
    navigation = existing(expanded(project["nav"], generated), names)
    project |= {
        "nav": navigation,
        "strict": strict,
        "docs_dir": "pages",
        "site_dir": "html",
        "extra_css": ["assets/site.css"],
        "extra_javascript": ["assets/search.js"],
    }
    shutil.copytree(THEME, site / "theme", dirs_exist_ok=True)
    project["theme"]["custom_dir"] = "theme"
    python = project["plugins"]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT / path) for path in python["paths"]]
    (site / "zensical.toml").write_text(tomlkit.dumps(config), encoding="utf-8")
    return navigation


def pages_of_navigation() -> list[str]:
    """The pages that zensical.toml names; generated ones as FOLDER/*."""
    return list(listed(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]))


if __name__ == "__main__":
    sys.exit(main())
