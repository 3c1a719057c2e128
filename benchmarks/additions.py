"""Prompts of the benchmarks against TRL."""

from __future__ import annotations

import random

SHOTS = "7+8=15\n9+4=13\n"
NEW_TOKENS = 3
INSTRUCTIONS = """You are a careful assistant who solves problems of arithmetic for pupils of a primary school. Read
the question twice before you answer. Write down every step of your calculation in a line of its
own, in the order in which you do them, and name the numbers that you use. If a question has no
answer, say so and explain in one sentence why it has none. Do not use a calculator, do not guess,
and do not leave out steps that seem easy to you: the pupils learn from seeing all of them. When you
are done, check the result with a rough estimate, and correct your steps if both differ. Close with
a line that begins with the word Answer, followed by a colon and the result as a number without a
unit."""


def addition_prompts(count: int, *, seed: int = 0) -> list[str]:
    """Distinct few-shot additions of 18 tokens, as in the demo: the worked examples are a prefix of all."""
    questions = [f"{left}+{right}=" for left in range(10) for right in range(10)]
    return [SHOTS + question for question in random.Random(seed).sample(questions, count)]


def chat_prompts(count: int, *, seed: int = 0) -> list[str]:
    """Prompts of about 200 tokens: common instructions in a system turn, and distinct questions."""
    source = random.Random(seed)
    prompts = []
    for _ in range(count):
        boxes, pens, given = (source.randint(11, 99) for _ in range(3))
        question = f"A school has {boxes} boxes of {pens} pens each and gives {given} pens away. How many are left?"
        turns = f"<|im_start|>system\n{INSTRUCTIONS}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        prompts.append(f"{turns}<|im_start|>assistant\n")
    return prompts


def unrelated_prompts(count: int, *, seed: int = 0) -> list[str]:
    """Random digits of the same length: no shared prefix."""
    source = random.Random(seed)
    length = len(addition_prompts(1)[0])
    return ["".join(source.choice("0123456789") for _ in range(length)) for _ in range(count)]
