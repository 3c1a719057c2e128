"""No test of this folder leaves a process behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidemill.core import ipc


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Compares with the processes before: the test process may have others, of earlier tests."""
    before = set(ipc.child_processes())
    yield
    assert set(ipc.child_processes()) <= before
