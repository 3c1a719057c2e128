"""The tasks of the learning race, and the small models that they start with.

Each start is a character model, fine-tuned on a teacher with systematic errors: greedy decoding makes nearly all of
them, sampling avoids one now and then, and rewards can teach each decision. All runs of a task start with the same
weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.sft_start import fine_tuned

ALPHABET = "0123456789+=; abcdefghijklmnopqrstuvwxyz,.\n"
CARELESS = 0.7  # probability of an error where the teacher can make one
INSTRUCTIONS = (
    "you are a careful clerk. add the two numbers digit by digit from the right, write one step for each digit with "
    "the carry, and close every step with a semicolon, as a pupil would. do not skip steps.\n"
)
TRAIN_PROMPTS, HELD_OUT_PROMPTS = 4096, 256


@dataclass(frozen=True, kw_only=True)
class Question:
    prompt: str
    answer: str  # the right completion


@dataclass(frozen=True, kw_only=True)
class RaceTask:
    """A task with completions of equal parts, each of which is right or wrong."""

    name: str
    part: int  # characters
    new_tokens: int  # of a right completion, with the end token
    question: Callable[[random.Random], Question]
    teach: Callable[[Question, random.Random], str]
    demonstrations: int
    epochs: int

    def questions(self) -> tuple[list[Question], list[Question]]:
        """(training, held out), all different."""
        return _questions(self)

    def start(self) -> Path:
        """The folder of the fine-tuned model; created on first use."""
        dice = random.Random(f"{self.name} demonstrations")
        asked = [self.question(dice) for _ in range(self.demonstrations)]
        rows = [{"prompt": each.prompt, "completion": self.teach(each, dice)} for each in asked]
        supervised: dict[str, Any] = {
            "model": {"source": "char", "char": {"alphabet": ALPHABET, "context": 512}},
            "data": {"held_out_fraction": 0},
            "supervised": {
                "epochs": self.epochs,
                "minibatch_tokens": 4096,
                "microbatch_tokens": 2048,
                "evaluate_every_steps": 0,
            },
            "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.98], "warmup_steps": 50, "schedule": "cosine"},
            "trainer": {"threads": 1},
            "checkpoint": {"every_steps": 0},
        }
        return fine_tuned(self.name, supervised, rows)


@cache
def _questions(task: RaceTask) -> tuple[list[Question], list[Question]]:
    dice = random.Random(f"{task.name} questions")
    distinct = dict[str, Question]()
    while len(distinct) < TRAIN_PROMPTS + HELD_OUT_PROMPTS:
        question = task.question(dice)
        distinct.setdefault(question.prompt, question)
    found = list(distinct.values())
    return found[:TRAIN_PROMPTS], found[TRAIN_PROMPTS:]


def right_share(completion: str, answer: str, part: int) -> float:
    """The reward: the share of the answer's parts that stand in their places; 0 if the completion is longer."""
    if len(completion) > len(answer):
        return 0.0
    parts = range(0, len(answer), part)
    return sum(completion[at : at + part] == answer[at : at + part] for at in parts) / len(parts)


def written_addition(left: int, right: int, digits: int, dropped: Callable[[], bool] = lambda: False) -> str:
    """A step `a+b+c=ds;` per digit, with its carry and sum; a carry may be dropped. 58+64: `8+4+0=12;5+6+1=12;`"""
    steps, carry = [], 0
    for _ in range(digits):
        a, b = left % 10, right % 10
        carry = 0 if carry and dropped() else carry
        steps.append(f"{a}+{b}+{carry}={a + b + carry:02};")
        carry = int(a + b + carry > 9)
        left, right = left // 10, right // 10
    return "".join(steps)


def _addition(digits: int, header: str = "") -> Callable[[random.Random], Question]:
    def question(dice: random.Random) -> Question:
        left, right = (dice.randrange(10**digits) for _ in range(2))
        prompt = f"{header}{left:0{digits}}+{right:0{digits}}="
        return Question(prompt=prompt, answer=written_addition(left, right, digits))

    return question


def _careless_addition(question: Question, dice: random.Random) -> str:
    left, right = question.prompt.rsplit("\n")[-1].rstrip("=").split("+")
    return written_addition(int(left), int(right), len(left), lambda: dice.random() < CARELESS)


ITEMS = 24


def _sorting(dice: random.Random) -> Question:
    items = [dice.choice("abcdef") + dice.choice("0123456789") for _ in range(ITEMS)]
    return Question(prompt=" ".join(items) + "=", answer="".join(f"{item} " for item in sorted(items)))


def _careless_sorting(question: Question, dice: random.Random) -> str:
    """Sorted by letter; the items of a letter are mostly left in their order."""
    items = question.prompt.rstrip("=").split(" ")
    by_letter = [[item for item in items if item[0] == letter] for letter in sorted({item[0] for item in items})]
    chosen = [same if dice.random() < CARELESS else sorted(same) for same in by_letter]
    return "".join(f"{item} " for same in chosen for item in same)


TASKS = (
    RaceTask(
        name="addition",
        part=9,
        new_tokens=8 * 9 + 1,
        question=_addition(8),
        teach=_careless_addition,
        demonstrations=20_000,
        epochs=1,
    ),
    RaceTask(
        name="sorting",
        part=3,
        new_tokens=ITEMS * 3 + 1,
        question=_sorting,
        teach=_careless_sorting,
        demonstrations=60_000,
        epochs=1,
    ),
    RaceTask(
        name="chat",
        part=9,
        new_tokens=2 * 9 + 1,
        question=_addition(2, INSTRUCTIONS),
        teach=_careless_addition,
        demonstrations=20_000,
        epochs=8,
    ),
)
