from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.overlap_scoring import Step, check_pairs
from tidemill.core.records import SampleId

SAMPLE = SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=0)
LATE = Step(weights="a", scores={SAMPLE: b"1"}, tokens=9.0, share_ahead=0.0, delay_s=1.0, tail_s=1.0, step_s=1.0)
AHEAD = replace(LATE, share_ahead=0.6)


@pytest.mark.parametrize(
    ("late", "ahead", "why"),
    [
        ({}, {"share_ahead": 0.0}, "actor: no tokens read ahead"),
        ({"share_ahead": 0.6}, {}, "actor: 60% of the tokens of a late step were read ahead"),
        ({}, {"scores": {SAMPLE: b"2"}}, "scores differ"),
        ({"scores": {}}, {"scores": {}}, "no scores"),
        ({}, {"weights": "b"}, "the policies differ"),
    ],
)
def test_planted_breaks_fail(late: dict[str, Any], ahead: dict[str, Any], why: str) -> None:
    check_pairs("actor", [(LATE, AHEAD)])
    with pytest.raises(RuntimeError, match=why):
        check_pairs("actor", [(LATE, AHEAD), (replace(LATE, **late), replace(AHEAD, **ahead))])


def test_a_scorer_on_the_engines_thread_need_not_compute_ahead() -> None:
    check_pairs("shared_thread", [(LATE, LATE)])
