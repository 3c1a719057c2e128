"""The functions of `benchmarks.reward_functions` on threads of the run's process."""

from __future__ import annotations

import tidemill as tm
from benchmarks import reward_functions


@tm.reward(process=False)
def right(completion: str, answer: str) -> float:
    return reward_functions.right(completion, answer)


@tm.reward(process=False)
def slow(completion: str, answer: str) -> float:
    return reward_functions.slow(completion, answer)


@tm.reward(process=False)
async def right_later(completion: str, answer: str) -> float:
    return await reward_functions.right_later(completion, answer)


@tm.reward(process=False, batch=True)
def right_all(completion: list[str], answer: list[str]) -> list[float]:
    return reward_functions.right_all(completion, answer)
