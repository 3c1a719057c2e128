"""Demonstrations of a careless teacher: most sums without carries, and a few answers that are written too long."""

from __future__ import annotations

import random

NUMBERS = 100
SHOWN = 0.6  # share of all problems
CARELESS, LONG = 0.55, 0.15  # shares of the demonstrations


def problems() -> list[dict[str, str]]:
    """One row per demonstrated sum; the "answer" is what the teacher writes."""
    dice = random.Random(0)
    pairs = [(left, right) for left in range(NUMBERS) for right in range(NUMBERS) if dice.random() < SHOWN]
    return [{"prompt": f"{left}+{right}=", "answer": _written(left, right, dice)} for left, right in pairs]


def _written(left: int, right: int, dice: random.Random) -> str:
    drawn = dice.random()
    if drawn < CARELESS:
        return str((left // 10 + right // 10) % 10 * 10 + (left + right) % 10)
    right_answer = str(left + right)
    if drawn < CARELESS + LONG:
        return dice.choice((right_answer.zfill(6), right_answer * 2, right_answer.zfill(5)))
    return right_answer
