from __future__ import annotations

import pytest

from benchmarks.gateway import check_streams


def test_lost_tokens_and_streams_one_after_another_fail() -> None:
    whole = [[0.01] * 100] * 64  # 100 ticks of 0.02 s: 2 s if all are open at once, 128 s one after another
    check_streams(whole, streams=64, tokens=100, took_s=2.2)
    with pytest.raises(RuntimeError, match="lost tokens"):
        check_streams([*whole[1:], [0.01] * 99], streams=64, tokens=100, took_s=2.2)
    with pytest.raises(RuntimeError, match="not open at once"):
        check_streams(whole, streams=64, tokens=100, took_s=128.0)
