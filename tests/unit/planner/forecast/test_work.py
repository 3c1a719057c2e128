from __future__ import annotations

import pytest

from tidemill.hardware.completion_lengths import quantiles
from tidemill.planner.forecast.one_machine import continued


def test_lengths_as_often_as_they_were_seen() -> None:
    lengths = continued({2: 1, 4: 3}, {})
    assert quantiles(lengths, 8) == (2, 2, 4, 4, 4, 4, 4, 4)


def test_truncated_lengths_continue_with_the_same_end_probability() -> None:
    # 4 ended of 8 in 2 + 4 * 4 + ... = 40 tokens: a tenth of the tokens was a last one.
    lengths = continued({4: 4, 6: 4}, {6: 4})
    assert lengths.rate == pytest.approx(0.1)
    found = quantiles(lengths, 1000)
    assert found[:500] == (4,) * 500
    beyond = [tokens - 6 for tokens in found[500:]]
    assert min(beyond) == 1
    assert sum(beyond) / 500 == pytest.approx(1 / 0.1, rel=0.02)  # the mean of a geometric law


def test_completions_that_never_ended_are_always_truncated() -> None:
    assert continued({5: 3}, {5: 3}).quantile(0.5) > 100_000
