from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import rewards
from benchmarks.rewards import aims, measure


@pytest.mark.parametrize(
    ("seconds", "ratio", "reached"), [(0.3, 1.2, [True, True]), (0.31, 0.5, [False, True]), (0.1, 1.21, [True, False])]
)
def test_the_aims_are_about_trivial_rewards(seconds: float, ratio: float, reached: list[bool]) -> None:
    cases = [
        {"case": "slow", "samples": 64, "seconds": 9.0, "ratio": 9.0},
        {"case": "trivial", "samples": 1000, "seconds": seconds, "ratio": ratio},
    ]
    assert list(aims(cases).values()) == reached


@pytest.mark.parametrize(
    ("right", "message"), [((False, False), "a score is wrong"), ((True, False), "different scores")]
)
def test_a_wrong_score_is_an_error(
    right: tuple[bool, bool], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = iter(right)

    class Side:
        def __init__(self, *_: Any) -> None:
            self._right = next(answers)

        def turn(self) -> dict[str, Any]:
            return {"seconds": 1.0, "cpu_s": 1.0, "right": self._right}

        def close(self) -> None: ...

    monkeypatch.setattr(rewards, "Side", Side)
    with pytest.raises(RuntimeError, match=message):
        measure("trivial", 1, tmp_path)
