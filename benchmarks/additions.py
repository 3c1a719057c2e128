"""The same few-shot additions for both sides: 18 tokens (SmolLM2 has one a character here), completions of 3."""

from __future__ import annotations

import random

SHOTS = "7+8=15\n9+4=13\n"
NEW_TOKENS = 3


def addition_prompts(count: int, *, seed: int = 0) -> list[str]:
    """Distinct prompts of 18 characters."""
    questions = [f"{left}+{right}=" for left in range(10) for right in range(10)]
    return [SHOTS + question for question in random.Random(seed).sample(questions, count)]
