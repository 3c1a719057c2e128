"""Tests that share something costly run in one process of pytest-xdist."""

from __future__ import annotations

import os

import pytest

from tests.scheduling import FileScheduling


@pytest.mark.xdist_group("shown")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="not in a worker of pytest-xdist")
def test_pytest_xdist_is_told_the_group(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@shown") == request.config.getoption("loadgroup")


@pytest.mark.parametrize(
    ("test", "unit"),
    [
        ("tests/a.py::test_one", "tests/a.py"),
        ("tests/a.py::TestOne::test_two[x@y::z]", "tests/a.py"),
        ("tests/a.py::test_one[x]@ray", "ray"),
    ],
)
def test_files_and_groups_are_not_divided(test: str, unit: str) -> None:
    scheduling = FileScheduling.__new__(FileScheduling)  # without processes

    assert scheduling._split_scope(test) == unit
