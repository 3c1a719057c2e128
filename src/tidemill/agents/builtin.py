"""Built-in environments: guessing a number; and questions about numbers, with a calculator or with Python."""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

from tidemill.agents.environment import HELD_OUT_SEEDS, Environment, Split, Step, ToolEnvironment, tool
from tidemill.sandbox.records import Finished

HELD_OUT_SHARE = 0.2
"""Share of the ranges, and of the questions, that only held-out tasks have."""
NUMBERS = (10, 99)
SIZES = (12, 15)
"""Numbers in a range. Four guesses that halve it find every number among 15."""
LOWEST = 0.7
"""Share of the lowest number among the guesses of a teacher that does not halve."""
NUMBER = re.compile(r"-?\d+")
LONGEST_EXPRESSION = 100
QUESTIONS = (
    ("What is {0} * {1}?", "print({0} * {1})"),
    ("What is the sum of all numbers from {0} to {1}?", "print(sum(range({0}, {1} + 1)))"),
    ("What is the remainder of {1} divided by {0}?", "print({1} % {0})"),
)
"""Each with the program that answers it."""
LONGEST_OUTPUT = 2000
"""Characters of an output; the middle of a longer one is cut out."""


class Guess(Environment):
    """Find a number. The prompt is a range, "30-42", and an action a number, "35", each with the end of the line. The
    answer is the range that is still possible, "36-42", and at the end the number. An action that is not a number does
    not change the range.

    Args:
        guesses: number of guesses.
        careful: share of the teacher's episodes in which it guesses the middle of what is still possible; in the others
            it tries the lowest or the highest number.
    """

    stop = ("\n",)

    def __init__(self, guesses: int = 4, careful: float = 0.2) -> None:
        self.left, self.careful = guesses, careful

    @classmethod
    def tasks(cls, split: Split, count: int) -> list[dict[str, Any]]:
        return [{**row, "split": split} for row in super().tasks(split, count)]

    def reset(self, task: dict[str, Any], seed: int) -> str:
        draw = random.Random(seed)
        held_out = task.get("split") == "held_out"
        while True:
            size = draw.randint(*SIZES)
            low = draw.randint(NUMBERS[0], NUMBERS[1] - size + 1)
            if _held_out("range", low, size) == held_out:
                break
        self.low, self.high = low, low + size - 1
        self.number = draw.randint(self.low, self.high)
        self.halves, self.draw = draw.random() < self.careful, draw
        return self._range()

    def step(self, action: str) -> Step:
        self.left -= 1
        text = action.strip()
        guess = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None
        if guess == self.number or self.left == 0:
            return Step(text=f"{self.number}\n", reward=float(guess == self.number), done=True)
        if guess is not None and guess < self.number:
            self.low = max(self.low, guess + 1)
        elif guess is not None:
            self.high = min(self.high, guess - 1)
        return Step(text=self._range(), state_key=self._range())

    def demonstrate(self) -> str:
        if self.halves:
            return f"{(self.low + self.high) // 2}\n"
        return f"{self.low if self.draw.random() < LOWEST else self.high}\n"

    def _range(self) -> str:
        return f"{self.low}-{self.high}\n"


class NumberQuestions(ToolEnvironment):
    """Questions with a number as answer, and a tool that finds it."""

    system_prompt = "Answer with a number."

    def __init__(self, careful: float = 0.25) -> None:
        self.careful, self.called = careful, False

    def tool_call(self) -> dict[str, Any]:
        """The teacher's call."""
        raise NotImplementedError

    def demonstrate(self) -> str:
        careful = random.Random(repr(self.seed)).random() < self.careful
        if self.called or not careful:
            return f"It is {self.task['answer']}."
        self.called = True
        return f"<tool_call>\n{json.dumps(self.tool_call())}\n</tool_call>"

    def score(self, answer: str) -> float:
        """1 if the last number of the answer is right."""
        numbers = NUMBER.findall(answer.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == self.task["answer"])


class Calculator(NumberQuestions):
    """Products of two-digit numbers.

    Args:
        careful: share of the teacher's episodes that use the tool; in the others it answers at once.
    """

    stateful = False

    @classmethod
    def tasks(cls, split: Split, count: int) -> list[dict[str, Any]]:
        pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
        chosen = _of_split(pairs, split, lambda pair: ("product", *sorted(pair)))
        return [{"prompt": f"What is {left} * {right}?", "answer": str(left * right)} for left, right in chosen[:count]]

    def tool_call(self) -> dict[str, Any]:
        expression = re.findall(r"\d+ \* \d+", self.task["prompt"])[0]
        return {"name": "calculate", "arguments": {"expression": expression}}

    @tool(timeout_s=2)
    def calculate(self, expression: str) -> str:
        """Value of an arithmetic expression.

        Args:
            expression: Numbers with +, -, *, / and parentheses.
        """
        if len(expression) > LONGEST_EXPRESSION:
            raise ValueError("the expression is too long")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.6g}"


OPERATIONS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("use numbers, +, -, *, / and parentheses")


def _held_out(*key: object) -> bool:
    return random.Random(repr(key)).random() < HELD_OUT_SHARE


def _of_split(
    keys: Iterable[tuple[int, ...]], split: Split, held_out_key: Callable[[tuple[int, ...]], tuple[object, ...]] = tuple
) -> list[tuple[int, ...]]:
    """The questions of a split, in an order that is always the same."""
    chosen = [key for key in keys if _held_out(*held_out_key(key)) == (split == "held_out")]
    random.Random(HELD_OUT_SEEDS).shuffle(chosen)
    return chosen


class PythonTool(NumberQuestions):
    """Questions about two numbers below 100, and a tool that runs Python. Files stay from one call of an episode to the
    next, variables do not.

    Args:
        careful: share of the teacher's episodes that use the tool; in the others it answers at once.
        timeout_s: deadline of a program, in seconds.
    """

    needs_sandbox = True

    def __init__(self, careful: float = 0.25, timeout_s: float = 5.0) -> None:
        super().__init__(careful)
        self.timeout_s = timeout_s

    @classmethod
    def tasks(cls, split: Split, count: int) -> list[dict[str, Any]]:
        keys = [
            (kind, low, high) for kind in range(len(QUESTIONS)) for low in range(10, 99) for high in range(low, 100)
        ]
        tasks = []
        for kind, low, high in _of_split(keys, split)[:count]:
            question, program = (text.format(low, high) for text in QUESTIONS[kind])
            answer = (low * high, sum(range(low, high + 1)), high % low)[kind]
            tasks.append({"prompt": question, "program": program, "answer": str(answer)})
        return tasks

    def tool_call(self) -> dict[str, Any]:
        return {"name": "python", "arguments": {"code": self.task["program"]}}

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: the program.
        """
        command = ["python3", "-I", "-"]
        return output_of(self.sandbox.run(command, stdin=code.encode(errors="replace"), timeout_s=self.timeout_s))


def output_of(finished: Finished) -> str:
    """What an agent sees of a command: its output, the last line of its error, the limit that ended it."""
    text = finished.stdout.decode(errors="replace").replace("\0", "\\0")
    if len(text) > LONGEST_OUTPUT:
        text = f"{text[: LONGEST_OUTPUT // 2]}\n...\n{text[-LONGEST_OUTPUT // 2 :]}"
    errors = finished.stderr.decode(errors="replace").replace("\0", "\\0").strip().split("\n")
    if finished.ended:
        return f"{text}error: ended by its limit of {finished.ended}\n"
    return text + (f"{errors[-1][:LONGEST_OUTPUT]}\n" if finished.code else "")


BUILT_IN: dict[str, type[Environment]] = {"guess": Guess, "calculator": Calculator, "python": PythonTool}
