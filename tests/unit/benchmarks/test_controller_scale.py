from __future__ import annotations

import pytest

from benchmarks.controller_scale import check_load

QUIET = {"kept_up": 0.999, "finished_per_s": 1290.0}


@pytest.mark.parametrize(
    ("broken", "why"),
    [({"kept_up": 0.7}, r"only 70.0% of the messages came in time")],
)
def test_a_controller_without_its_load_fails(broken: dict[str, float], why: str) -> None:
    check_load(QUIET)
    with pytest.raises(RuntimeError, match=why):
        check_load(QUIET | broken)
