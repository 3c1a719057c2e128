"""Tests that share something costly run in one process of pytest-xdist."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("shown")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="not in a worker of pytest-xdist")
def test_pytest_xdist_is_told_the_group(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@shown") == request.config.getoption("loadgroup")
