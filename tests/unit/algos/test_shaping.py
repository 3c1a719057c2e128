from __future__ import annotations

import pytest

from tidemill.algos.shaping import overlong_penalty


@pytest.mark.parametrize(
    # limit 20, buffer 4: nothing up to 16, then a quarter a token
    ("tokens", "penalty"),
    [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0)],
)
def test_overlong(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_new_tokens=20, buffer_tokens=4) == penalty


def test_no_buffer_no_penalty() -> None:
    assert overlong_penalty(20, max_new_tokens=20, buffer_tokens=0) == 0.0
