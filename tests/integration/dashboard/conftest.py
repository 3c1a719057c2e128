from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module only: while it is open the thread has an event loop, which tests of other folders start, too."""
    with chromium() as found:
        yield found
