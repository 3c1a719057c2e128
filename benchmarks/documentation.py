"""Times of the documentation: its build, the first paint of its pages in Chromium, and the tutorials.

    python -m benchmarks.documentation [--only build,paint,tutorials]

- *build*: wall time of `make docs` in a new folder;
- *first paint*: median of five, with an empty cache, from a server on this machine;
- *tutorials*: wall and CPU time of each notebook, and the memory of the largest process of all.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.measuring import BYTES_PER_GB, exit_code, write_part
from benchmarks.origin import parsed
from benchmarks.watch_pages import PAINTS, first_paint
from scripts.site.build import build
from scripts.site.notebook_execution import execute
from scripts.site.notebooks import TUTORIALS, settings_of, write_notebook
from scripts.site.serving import served

PARTS = ("build", "paint", "tutorials")
BUILD_S, FIRST_PAINT_S, TUTORIAL_S = 60.0, 0.5, 180.0
"""Targets."""
PAGES = ("index.html", "quickstart.html", "concepts/policy-lag.html", "explore/gae.html")
REFERENCES = ("reference/configuration/algorithm.html", "reference/api/training.html")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas (default: all)")
    only = parsed(parser).only.split(",")
    measured = dict[str, dict[str, Any]]()
    if {"build", "paint"} & {*only}:
        with tempfile.TemporaryDirectory() as folder:
            measured |= site(Path(folder))
    if "tutorials" in only:
        measured["tutorials"] = tutorials()
    for part, figures in measured.items():
        write_part("documentation", part, figures, parts=PARTS)
    return exit_code(measured)


def site(folder: Path) -> dict[str, dict[str, Any]]:
    started_s = time.monotonic()
    build(folder)
    build_s = time.monotonic() - started_s
    paints = dict[str, float]()
    with served(folder / "html") as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        first_paint(browser, url)  # the browser's own first page
        for page in (*PAGES, *REFERENCES):
            paints[page] = statistics.median(first_paint(browser, f"{url}/{page}") for _ in range(PAINTS))
        browser.close()
    print(f"build {build_s:.0f} s (target {BUILD_S:g}); first paint, target {FIRST_PAINT_S:g} s:")
    for page, paint_s in paints.items():
        print(f"  {page:45} {paint_s:.2f} s")
    return {
        "build": {"build_s": build_s, "reached": build_s <= BUILD_S},
        "paint": {"first_paint_s": paints, "reached": max(paints.values()) < FIRST_PAINT_S},
    }


def tutorials() -> dict[str, Any]:
    figures = dict[str, Any]()
    for page in sorted(TUTORIALS.glob("*.md")):
        if page.stem == "index":
            continue
        done = execute(write_notebook(page), **settings_of(page.read_text(encoding="utf-8")))
        figures[page.stem] = done._asdict()
        print(f"{page.stem:20} {done.wall_s:4.0f} s (target {TUTORIAL_S:g}), {done.cpu_s:4.0f} s of CPU time")
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"largest process: {peak_bytes / BYTES_PER_GB:.1f} GB")
    longest_s = max(each["wall_s"] for each in figures.values())
    return {"notebooks": figures, "peak_bytes": peak_bytes, "reached": longest_s <= TUTORIAL_S}


if __name__ == "__main__":
    sys.exit(main())
