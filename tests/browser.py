"""A real Chromium for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

from tests.sandboxes import skip

DEADLINE_MS = 15_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test if Chromium is not installed, except where everything must run."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=4 * DEADLINE_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, ignored: str = ""
) -> Iterator[Page]:
    """The page at a URL; an error of its scripts, or one in the console, fails the test.

    Args:
        ignored: a part of errors that are expected.
    """
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
    page = context.new_page()
    page.set_default_timeout(DEADLINE_MS)
    errors = list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    try:
        page.goto(url)
        yield page
        unexpected = [error for error in errors if not ignored or ignored not in error]
        assert not unexpected, unexpected
    finally:
        context.close()
