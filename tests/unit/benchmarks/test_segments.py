"""Outcomes of segments added up, by hand."""

from __future__ import annotations

import pytest

from benchmarks.simulator.segments import Outcome, total


def outcome(**changes: float) -> Outcome:
    fields = {
        "steps": 2,
        "tokens": 1000,
        "seconds": 10.0,
        "usd": 5.0,
        "train_s": 4.0,
        "trainer_idle": 0.1,
        "workers_idle": 0.2,
        "workers": 3.0,
        "evictions": 1,
        "recomputed": 50,
    }
    return Outcome(**{**fields, **changes})  # type: ignore[arg-type]


def test_segments_count_as_long_as_they_were() -> None:
    found = total(
        {"A": outcome(), "B": outcome(tokens=2000, seconds=30.0, trainer_idle=0.3, workers_idle=0.0, workers=1.0)}
    )

    assert found.tokens_per_s == pytest.approx(3000 / 40)
    assert found.tokens_per_usd == pytest.approx(3000 / 10)
    assert found.workers == pytest.approx((3 * 10 + 1 * 30) / 40)
    assert found.trainer_idle == pytest.approx((1 + 9) / 40)
    assert found.workers_idle == pytest.approx(0.2 * 30 / 60)  # of 60 machine-seconds those of A idled for a fifth
    assert found.evictions == 2
    assert found.recomputed_share == pytest.approx(100 / 3000)
    assert found.by_segment == {"A": 100.0, "B": pytest.approx(2000 / 30)}
