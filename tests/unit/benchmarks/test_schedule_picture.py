"""The picture of schedules shows what it says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from benchmarks.schedule_picture import BATCH, BATCHES, SLOTS, Drawn, ahead, lengths, tail_batching, waiting


@pytest.mark.parametrize("schedule", [waiting, tail_batching, ahead])
def test_every_sample_is_trained_once_and_slots_hold_one_at_a_time(schedule: Callable[[list[float]], Drawn]) -> None:
    durations = lengths()
    drawn = schedule(durations)

    trained = [bar for bar in drawn.bars if bar.batch is not None]
    assert sorted(bar.end - bar.start for bar in trained) == pytest.approx(sorted(durations))
    assert [sum(bar.batch == batch for bar in trained) for batch in range(BATCHES)] == [BATCH] * BATCHES
    for slot in range(SLOTS):
        bars = sorted((bar.start, bar.end) for bar in drawn.bars if bar.slot == slot)
        assert all(end <= start for (_, end), (start, _) in pairwise(bars))


def test_only_tail_batching_discards_and_both_others_end_in_the_shown_order() -> None:
    found = {schedule: schedule(lengths()) for schedule in (waiting, tail_batching, ahead)}

    assert [any(bar.batch is None for bar in drawn.bars) for drawn in found.values()] == [False, True, False]
    ends = [drawn.publishes[-1] for drawn in found.values()]
    assert ends == sorted(ends, reverse=True)
