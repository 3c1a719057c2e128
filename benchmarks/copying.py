"""A task whose answers have a long tail: copying numbers of 2 to 96 digits, most of them short.

Prompts are padded to the same length, so that it does not predict the length of the answer. The teacher adds one to
every digit in some demonstrations, more often in long ones: the model can copy, but often does not, least of all long
numbers. Runs start with the same weights.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from benchmarks.sft_start import fine_tuned

WIDEST = 96  # digits
MEDIAN, SIGMA = 10.0, 1.0  # of their number, which is log-normal
EVEN_AT = 12  # digits at which half of the demonstrations are wrong
STOP = "\n"
ALPHABET = "0123456789.>\n"
CONTEXT = 2 * WIDEST + 2
DEMONSTRATIONS, PROMPTS, HELD_OUT = 2400, 240, 128
SUPERVISED: dict[str, Any] = {
    "model": {
        "source": "char",
        "char": {"alphabet": ALPHABET, "hidden_size": 64, "layers": 2, "heads": 4, "context": CONTEXT},
    },
    "data": {"held_out_fraction": 0, "end_token": False},
    "supervised": {"epochs": 0, "minibatch_tokens": 4000, "microbatch_tokens": 4000, "evaluate_every_steps": 0},
    "optimizer": {"learning_rate": 3e-3, "betas": [0.9, 0.98], "warmup_steps": 50},
    "trainer": {"steps": 500, "threads": 1},
    "checkpoint": {"every_steps": 0},
}


def numbers(count: int, dice: random.Random) -> list[str]:
    """Distinct numbers of digits."""
    found = dict[str, None]()
    while len(found) < count:
        digits = min(WIDEST, max(2, round(MEDIAN * math.exp(SIGMA * dice.gauss(0.0, 1.0)))))
        found["".join(dice.choice("0123456789") for _ in range(digits))] = None
    return list(found)


def prompt(number: str) -> str:
    return number.ljust(WIDEST, ".") + ">"


def careless(number: str) -> str:
    """Every digit plus one, modulo 10."""
    return "".join(str((int(digit) + 1) % 10) for digit in number)


def demonstrations() -> list[dict[str, str]]:
    """Of the teacher."""
    dice = random.Random(0)
    return [
        {
            "prompt": prompt(number),
            "completion": (careless(number) if dice.random() < len(number) / (len(number) + EVEN_AT) else number)
            + STOP,
        }
        for number in numbers(DEMONSTRATIONS, dice)
    ]


def start() -> Path:
    """The folder of the fine-tuned model; created on first use. Raises: as `fine_tuned`."""
    return fine_tuned("copying-start", SUPERVISED, demonstrations())


def write_rows(folder: Path, *, seed: int) -> tuple[Path, Path]:
    """Files with the training prompts of a seed, and with the held-out ones, the same for all seeds."""
    paths = folder / f"train-{seed}.jsonl", folder / "held-out.jsonl"
    for path, count, dice in zip(paths, (PROMPTS, HELD_OUT), (seed + 2, 1), strict=True):
        rows = [{"prompt": prompt(number), "answer": number + STOP} for number in numbers(count, random.Random(dice))]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths
