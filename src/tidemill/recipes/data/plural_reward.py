"""A reward of one's own: called for every finished sample, in a thread (an `async def` would run on the event loop)."""

from __future__ import annotations

from itertools import takewhile
from typing import Any


def right_start(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """The share of the answer's letters that the completion starts with: "babys" for "babies" gives 3 of 6.

    Args:
        prompt: the text the model saw.
        completion: what it wrote, with the stop string that ended it.
        answer: the line's `answer`.
        metadata: the line's other fields, here `rule`.
    """
    written = completion.strip().split("\n")[0]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(written, answer, strict=False))
    return len(list(alike)) / len(answer)
