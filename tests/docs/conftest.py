"""The site, built once."""

from __future__ import annotations

import functools
import http.server
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from scripts.site.build import build
from tests.browser import chromium


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    folder: Path
    url: str
    """Of a server on this machine, without the final slash."""
    build_s: float
    """Time of processors that the build took."""

    @property
    def pages(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.html"))

    def file(self, page: str) -> str:
        return (self.folder / page).as_uri()


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    before = processor_s()
    with ThreadPoolExecutor() as another:  # a browser's event loop may run in this thread
        another.submit(build, folder).result()
    build_s = processor_s() - before
    handler = functools.partial(Handler, directory=str(folder / "html"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Site(folder=folder / "html", url=f"http://127.0.0.1:{server.server_port}", build_s=build_s)
        server.shutdown()


def processor_s() -> float:
    """Of this process and its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started
