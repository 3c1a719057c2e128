"""Reward functions for `benchmarks.rewards`: in processes, as by default, and on threads."""

from __future__ import annotations

import asyncio
import time

import tidemill as tm


def right(completion: str, answer: str) -> float:
    return float(completion.rsplit(maxsplit=1)[-1] == answer)


async def right_later(completion: str, answer: str) -> float:
    await asyncio.sleep(0)
    return float(completion == answer)


@tm.reward(batch=True)
def right_all(completion: list[str], answer: list[str]) -> list[float]:
    return [float(one == other) for one, other in zip(completion, answer, strict=True)]


def slow(completion: str, answer: str) -> float:
    """Waits as for a judge's answer."""
    time.sleep(0.05)
    return float(completion == answer)
