"""Environments whose tasks are of every kind; environment processes import them from this file."""

from __future__ import annotations

from typing import Any

from tidemill.agents.environment import Environment, Step


class Walk(Environment):
    """All tasks have one text."""

    def reset(self, task: dict[str, Any], seed: int) -> str:
        return "go"

    def step(self, action: str) -> Step:
        return Step(done=True)


class Overlapping(Walk):
    @classmethod
    def tasks(cls, split: str, count: int) -> list[dict[str, Any]]:
        return [{"seed": number} for number in range(count)]


class Repeating(Walk):
    """Half of the rows have no answer, and each is there twice."""

    @classmethod
    def tasks(cls, split: str, count: int) -> list[dict[str, Any]]:
        return [
            {"seed": number // 2, "split": split} | ({"answer": 7} if number % 4 < 2 else {"answer": None})
            for number in range(count)
        ]


class Raising(Walk):
    def reset(self, task: dict[str, Any], seed: int) -> str:
        raise OSError("no such device")


class Rows(Walk):
    """Its rows have scalars of NumPy, or are wrong."""

    @classmethod
    def tasks_for(cls, params: dict[str, Any], split: str, count: int) -> Any:
        import numpy as np  # not for the servers of other tests

        first = 100 * (split == "train")
        return {
            "scalars": [{"seed": np.int64(first + number), "share": np.float32(0.5)} for number in range(count)],
            "empty": [],
            "none": None,
            "numbers": [1, 2],
            "sets": [{"a": {1}}],
            "surrogates": [{"answer": "\ud800"}],
        }[params["kind"]]

    def __init__(self, kind: str) -> None: ...
