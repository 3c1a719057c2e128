"""The length penalty by hand and against TRL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards import get_soft_overlong_punishment

from tidemill.algos.advantages import overlong_penalty


@pytest.mark.parametrize(
    # limit 20, buffer 4: 0 up to 16, then a quarter per token
    ("tokens", "penalty"),
    [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0)],
)
def test_overlong(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_new_tokens=20, buffer_tokens=4) == penalty


def test_without_a_buffer_there_is_no_penalty() -> None:
    assert overlong_penalty(20, max_new_tokens=20, buffer_tokens=0) == 0.0


@given(st.integers(1, 50), st.data())
def test_penalty_agrees_with_trl(limit: int, data: st.DataObject) -> None:
    buffer, tokens = data.draw(st.integers(1, limit)), data.draw(st.integers(0, limit))
    (theirs,) = get_soft_overlong_punishment(limit, buffer)([[1] * tokens])
    assert overlong_penalty(tokens, max_new_tokens=limit, buffer_tokens=buffer) == pytest.approx(theirs, abs=1e-12)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 100), st.integers(0, 100))
def test_the_penalty_is_monotonic_and_at_most_one(first: int, second: int, limit: int, buffer: int) -> None:
    shorter, longer = sorted((min(first, limit), min(second, limit)))
    penalties = [
        overlong_penalty(tokens, max_new_tokens=limit, buffer_tokens=min(buffer, limit)) for tokens in (shorter, longer)
    ]
    assert -1.0 <= penalties[1] <= penalties[0] <= 0.0
