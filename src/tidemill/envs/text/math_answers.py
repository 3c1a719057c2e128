"""The reward `math_verify`, as a function for other processes: parsing what a model wrote can take for ever."""

from __future__ import annotations

import logging
from typing import Any

import math_verify as package

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeout is off


def math_verify(completion: str, answer: str) -> float:
    """1 if math-verify finds the completion's mathematical expression equal to the answer's; else 0.

    Raises:
        ValueError: the answer has no expression.
    """
    expected = _parsed(f"${answer}$" if "\\" in answer and "$" not in answer else answer)
    if not expected:
        raise ValueError(f"math-verify finds no expression in the answer {answer[:40]!r}")
    return float(package.verify(expected, _parsed(completion), timeout_seconds=None))


def _parsed(text: str) -> Any:
    return package.parse(text, parsing_timeout=None)  # the caller's deadline holds
