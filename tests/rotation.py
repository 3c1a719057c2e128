"""The day decides which share of many like cases `make test` runs; `make test-all` runs them all.

A failure names its day: `TIDEMILL_TEST_DAY=739947 make test` repeats its cases.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

# In the environment, so that all processes of a session have the same day, also around midnight.
DAY = int(os.environ.setdefault("TIDEMILL_TEST_DAY", str(datetime.now(UTC).toordinal())))


def share_of_the_day(cases: Sequence[Case], size: int, day: int = DAY) -> list[Case]:
    """`size` neighbours among the cases, which are a ring; the next day has the next ones."""
    return [cases[(day * size + at) % len(cases)] for at in range(size)]


def daily(cases: Sequence[Case], size: int) -> list[Any]:
    """Parameters of a test: the share of the day, and the others marked slow."""
    today = share_of_the_day(cases, size)
    return [case if case in today else pytest.param(case, marks=pytest.mark.slow) for case in cases]
