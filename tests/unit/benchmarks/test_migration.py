"""The migration benchmark measures samples that moved, and fails without them."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.migration import Decoding, Migration, _migrated, check_migrations
from tidemill.core.protocols import LoopClock
from tidemill.core.records import SampleId

SAMPLE = SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=0)


def migrated(seen_at: str) -> Migration:
    """Of the one sample of a killed worker, seen last at `seen_at`."""

    async def run() -> Migration:
        decoding = Decoding(LoopClock())
        decoding.seen[SAMPLE] = (seen_at, 10.25)
        return await _migrated(decoding, "victim", {SAMPLE}, 10.0)

    return asyncio.run(run())


def test_a_kill_after_which_no_sample_moves_does_not_count() -> None:
    assert migrated("another") == Migration(samples=1, first_s=0.25, median_s=0.25, last_s=0.25)
    with pytest.raises(TimeoutError):
        migrated("victim")


def test_fewer_migrations_than_kills_fail() -> None:
    found = migrated("another")
    check_migrations([found, found], 2)
    with pytest.raises(RuntimeError, match="samples moved after only 1 of 2 kills"):
        check_migrations([found], 2)
