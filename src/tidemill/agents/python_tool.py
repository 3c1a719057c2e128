"""A built-in environment: questions that a few characters of Python answer, and an interpreter in the sandbox."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from tidemill.agents.environment import HELD_OUT_SEEDS, Split, ToolEnvironment, tool
from tidemill.sandbox.records import Finished

HELD_OUT_SHARE = 0.2
"""Share of the questions that only held-out tasks have."""
QUESTIONS = (
    ("What is {0} * {1}?", "print({0} * {1})"),
    ("What is the sum of all numbers from {0} to {1}?", "print(sum(range({0}, {1} + 1)))"),
    ("What is the remainder of {1} divided by {0}?", "print({1} % {0})"),
)
NUMBER = re.compile(r"-?\d+")
LONGEST_OUTPUT = 2000
"""Characters of an output; the middle of a longer one is cut out."""


class PythonTool(ToolEnvironment):
    """Questions about two numbers below 100, and a tool that runs Python. Files stay from one call of an episode to the
    next, variables do not.

    Args:
        careful: share of the teacher's episodes that use the tool; in the others it answers at once.
        timeout_s: deadline of a program, in seconds.
    """

    system_prompt = "Answer with a number."
    needs_sandbox = True

    def __init__(self, careful: float = 0.25, timeout_s: float = 5.0) -> None:
        self.careful, self.timeout_s, self.called = careful, timeout_s, False

    @classmethod
    def tasks(cls, split: Split, count: int) -> list[dict[str, Any]]:
        keys = [
            (kind, low, high) for kind in range(len(QUESTIONS)) for low in range(10, 99) for high in range(low, 100)
        ]
        chosen = [key for key in keys if (_held_out(key) == (split == "held_out"))]
        random.Random(HELD_OUT_SEEDS).shuffle(chosen)
        return [_task(*key) for key in chosen[:count]]

    def demonstrate(self) -> str:
        careful = random.Random(repr(self.seed)).random() < self.careful
        if self.called or not careful:
            return f"It is {self.task['answer']}."
        self.called = True
        call = {"name": "python", "arguments": {"code": self.task["program"]}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: the program.
        """
        return output_of(
            self.sandbox.run(["python3", "-I", "-"], stdin=code.encode(errors="replace"), timeout_s=self.timeout_s)
        )

    def score(self, answer: str) -> float:
        """1 if the last number of the answer is right."""
        numbers = NUMBER.findall(answer.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == self.task["answer"])


def output_of(finished: Finished) -> str:
    """What an agent sees of a command: its output, the last line of its error, the limit that ended it."""
    text = finished.stdout.decode(errors="replace").replace("\0", "\\0")
    if len(text) > LONGEST_OUTPUT:
        text = f"{text[: LONGEST_OUTPUT // 2]}\n...\n{text[-LONGEST_OUTPUT // 2 :]}"
    errors = finished.stderr.decode(errors="replace").replace("\0", "\\0").strip().split("\n")
    if finished.ended:
        return f"{text}error: ended by its limit of {finished.ended}\n"
    return text + (f"{errors[-1][:LONGEST_OUTPUT]}\n" if finished.code else "")


def _task(kind: int, low: int, high: int) -> dict[str, Any]:
    question, program = (text.format(low, high) for text in QUESTIONS[kind])
    answer = (low * high, sum(range(low, high + 1)), high % low)[kind]
    return {"prompt": question, "program": program, "answer": str(answer)}


def _held_out(key: tuple[int, ...]) -> bool:
    return random.Random(repr(key)).random() < HELD_OUT_SHARE
