"""Problems of the demo, counting by sevens, and the demonstrations of a teacher who is careless with large numbers."""

from __future__ import annotations

import random

STEP = 7
STARTS = range(1, 1600)
CARELESS = (0.25, 0.75)  # probability of each mistake, for the smallest and the largest start


def problems() -> list[dict[str, str]]:
    """Count beyond the next hundred, up to the one after it: "195:" has the answer "202 209 216 … 286 293 300"."""
    return [{"prompt": f"{start}:", "answer": _counted(start)} for start in STARTS]


def demonstrations() -> list[dict[str, str]]:
    """One for each problem; the "answer" is what the teacher writes."""
    dice = random.Random(0)
    low, high = CARELESS
    rows = list[dict[str, str]]()
    for start in STARTS:
        careless = low + (high - low) * start / STARTS[-1]
        answer = _counted(start, ten_too_many=dice.random() < careless, beyond=dice.random() < careless)
        rows.append({"prompt": f"{start}:", "answer": answer})
    return rows


def _counted(start: int, *, ten_too_many: bool = False, beyond: bool = False) -> str:
    """
    Args:
        ten_too_many: ten is added by mistake when the count passes the next hundred.
        beyond: the count ends one number too late.
    """
    hundred = start // 100 * 100 + 100
    before = range(start, hundred, STEP)
    after = range(before[-1] + STEP + 10 * ten_too_many, hundred + 101 + STEP * beyond, STEP)
    return " ".join(map(str, [*before[1:], *after]))
