from __future__ import annotations

import pytest

from benchmarks.shards import check_ranks

ALONE = [{"ranks": 1.0, "state_bytes": 100.0, "tokens_trained": 1024.0}]
RANK = {"ranks": 2.0, "state_bytes": 51.0, "tokens_trained": 1024.0}


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"ranks": 1.0}, r"ranks joined groups of \[2.0, 1.0\], expected 2 of 2"),
        ({"state_bytes": 40.0}, "the ranks hold 91 of 100 bytes"),
    ],
)
def test_ranks_that_do_not_share_the_training_fail(broken: dict[str, float], why: str) -> None:
    check_ranks({1: ALONE, 2: [RANK, RANK]})
    with pytest.raises(RuntimeError, match=why):
        check_ranks({1: ALONE, 2: [RANK, RANK | broken]})


def test_fewer_processes_or_tokens_than_said_fail() -> None:
    with pytest.raises(RuntimeError, match=r"ranks joined groups of \[2.0\], expected 2 of 2"):
        check_ranks({1: ALONE, 2: [RANK]})
    with pytest.raises(RuntimeError, match="different trained tokens"):
        check_ranks({1: ALONE, 2: [RANK | {"tokens_trained": 512.0}] * 2})
