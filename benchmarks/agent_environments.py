"""Environments of `benchmarks.agents`; environment processes import them from this file."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from tidemill.agents.builtin import Calculator, Guess, PythonTool
from tidemill.agents.environment import Environment, Step, tool

SLOW_S = (0.05, 0.2)


class SlowGuess(Guess):
    """`guess` with a step of 50 to 200 ms."""

    def reset(self, task: dict[str, Any], seed: int) -> str:
        self.waits = random.Random(seed)
        return super().reset(task, seed)

    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(self.waits.uniform(*SLOW_S))
        return super().step(action)


class BrokenCalculator(Calculator):
    """A calculator that is out of order, for the control."""

    @tool(timeout_s=2)
    def calculate(self, expression: str) -> str:
        """Value of an arithmetic expression.

        Args:
            expression: Numbers with +, -, *, / and parentheses.
        """
        raise ValueError("the calculator is out of order")


class BrokenPython(PythonTool):
    """An interpreter that is out of order, for the control."""

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: the program.
        """
        raise ValueError("the interpreter is out of order")


class Waiting(Environment):
    """Every turn takes `seconds`; the answer is one character."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, task: dict[str, Any], seed: int) -> str:
        return f"{seed % 1000:03}"

    def step(self, action: str) -> Step:
        time.sleep(self.seconds)
        return Step("0")


class Scribble(Environment):
    """Answers with random letters and spaces; the reward is random, too."""

    stop = ("eee",)

    def reset(self, task: dict[str, Any], seed: int) -> str:
        self.draw = random.Random(seed)
        return self._text()

    def step(self, action: str) -> Step:
        draw = random.Random(f"{self.draw.random()} {action}")
        return Step(self._text(), reward=draw.random(), done=draw.random() < 0.1)

    def _text(self) -> str:
        return "".join(self.draw.choices("abcde  \n", k=self.draw.randint(1, 16)))
