"""The site, built once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from scripts.site.build import build
from scripts.site.serving import served
from tests.browser import chromium


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    folder: Path
    url: str
    """Of a server on this machine, without the final slash."""

    @property
    def pages(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.html"))

    def file(self, page: str) -> str:
        return (self.folder / page).as_uri()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with ThreadPoolExecutor() as another:  # a browser's event loop may run in this thread
        another.submit(build, folder).result()
    with served(folder / "html") as url:
        yield Site(folder=folder / "html", url=url)


@pytest.fixture(scope="module")  # while it lives, an event loop runs in this thread
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started
