"""The search index of the site, from the sections that the generator finds in its pages."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.site.pages import Page
from tidemill.config.foreign_names import foreign_names

SYNONYMS = (
    ("kill", "killed", "crash", "interrupt", "abort"),
    ("evict", "preempt", "preemption", "eviction", "reclaim"),
    ("spot", "preemptible"),
    ("oom", "memory"),
    ("cost", "price", "dollar", "usd", "expensive", "cheap", "budget", "pay"),
    ("coefficient", "coef", "weight", "beta"),
    ("constant", "same", "flat", "equal", "identical"),
    ("reward", "verifier"),
    ("environment", "env"),
    ("dataset", "data"),
    ("staleness", "lag", "stale"),
    ("async", "asynchronous", "overlap"),
    ("start", "begin", "quickstart"),
    ("install", "installation", "setup"),
    ("error", "message", "failure", "exception"),
    ("gpu", "cuda"),
    ("notebook", "jupyter"),
    ("k8s", "kubernetes"),
    ("deterministic", "reproducible", "reproduce", "determinism", "identical"),
    ("finetune", "fine-tuning", "sft", "supervised"),
    ("checkpoint", "save"),
    ("logging", "log", "wandb", "tensorboard", "telemetry"),
    ("hyperparameter", "argument", "setting", "option", "key", "parameter"),
    ("continue", "resume", "restart"),
    ("speed", "fast", "slow", "throughput", "goodput"),
    ("dashboard", "watch", "live"),
    ("evaluate", "eval", "evaluation", "validation"),
    ("tool", "tools", "function-calling"),
    ("container", "docker", "image"),
)
"""Words that a reader may use for one another, besides the keywords in the front matter of a page."""
FACTORS = {
    "reference/configuration/": 0.78,
    "reference/api/": 0.8,
    "reference/planner": 0.85,
    "results/": 0.8,
    "project/changelog": 0.4,
    "project/": 0.6,
}
"""Of the score of pages that a reader rather looks something up in than searches an answer in."""
BLOCK = re.compile(r"<pre>.*?</pre>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
HIDDEN = re.compile(r'<span class="keywords"[^>]*>(?P<words>.*?)</span>', re.DOTALL)
MOST_CODE_CHARS = 600  # of a block; long listings would outweigh the text


def write_index(found: Path, pages: Path, titles: Mapping[str, str], target: Path) -> None:
    """Write the index as a script that sets `window.SEARCH_INDEX`.

    Args:
        found: search.json of the generator.
        pages: the Markdown files of the site, with descriptions and keywords in their front matter.
        titles: by page, the title of its group in the navigation.
    """
    rows: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    sections = list[dict[str, Any]]()
    for item in json.loads(found.read_text(encoding="utf-8"))["items"]:
        url, _, anchor = item["location"].partition("#")
        if url not in numbers:
            numbers[url] = len(rows)
            rows.append(page_row(url, plain(item["title"]), pages, titles))
        section = {"page": numbers[url], "anchor": anchor, "title": plain(item["title"]), "text": text_of(item["text"])}
        if words := " ".join(HIDDEN.findall(item["text"])):
            section["keywords"] = words
        sections.append(section)
    index = {"synonyms": SYNONYMS, "pages": rows, "sections": sections}
    target.write_text(f"window.SEARCH_INDEX = {json.dumps(index, ensure_ascii=False)};\n", encoding="utf-8")


def page_row(url: str, title: str, pages: Path, titles: Mapping[str, str]) -> dict[str, Any]:
    name = url.removesuffix(".html") + ".md"
    matter = Page.read(pages / name).front_matter
    words = [str(matter.get("description", "")), *map(str, matter.get("keywords", ())), name.replace("/", " ")[:-3]]
    boost = (matter.get("search") or {}).get("boost") or next(
        (factor for folder, factor in FACTORS.items() if name.startswith(folder)), 1.0
    )
    group = titles.get(name, "")
    return {
        "url": url,
        "title": title,
        "keywords": " ".join(words),
        "names": names_of(name),
        "group": group,
        "boost": float(boost),
    }


def names_of(page: str) -> list[str]:
    """What a framework calls its settings, for the page of those who come from it; its tables show a part of them."""
    names = [
        name.name
        for name in foreign_names()
        if page == f"coming-from/{name.framework.lower()}.md" and "*" not in name.name
    ]
    return sorted({part for name in names for part in (name.lower(), name.lower().rpartition(".")[2])})


def text_of(markup: str) -> str:
    """The text of a section, with long code blocks cut."""
    short = BLOCK.sub(lambda block: block[0][:MOST_CODE_CHARS], HIDDEN.sub(" ", markup))
    return plain(short)


def plain(markup: str) -> str:
    return " ".join(html.unescape(TAG.sub(" ", markup)).replace("¶", " ").split())


def groups(items: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every page of a navigation with the titles above it: `How-to › Agents`."""
    for item in items:
        if isinstance(item, str):
            yield item, " › ".join(path)
        else:
            for title, below in item.items():
                yield from groups(below, (*path, title))
