"""A reward in a module that imports little: the process of the reward imports it, and torch would take seconds."""

from __future__ import annotations

import tidemill as tm


@tm.reward
def digits(completion: str) -> float:
    return sum(map(str.isdigit, completion)) / 2
