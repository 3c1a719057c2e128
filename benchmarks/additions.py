"""Prompts of 18 tokens (one per character for SmolLM2), to be continued by 3."""

from __future__ import annotations

import random

SHOTS = "7+8=15\n9+4=13\n"
NEW_TOKENS = 3


def addition_prompts(count: int, *, seed: int = 0) -> list[str]:
    """Distinct few-shot additions, as in the demo: the worked examples are a prefix of all."""
    questions = [f"{left}+{right}=" for left in range(10) for right in range(10)]
    return [SHOTS + question for question in random.Random(seed).sample(questions, count)]


def unrelated_prompts(count: int, *, seed: int = 0) -> list[str]:
    """Random digits of the same length: no shared prefix."""
    source = random.Random(seed)
    length = len(addition_prompts(1)[0])
    return ["".join(source.choice("0123456789") for _ in range(length)) for _ in range(count)]
