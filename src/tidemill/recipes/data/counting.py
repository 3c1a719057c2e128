"""Prompts of the demo: count from one number to another, up or down."""

from __future__ import annotations

LENGTHS = range(8, 13)
EXAMPLES = ((3, 9), (32, 23))


def problems() -> list[dict[str, str]]:
    """Every start below 100, every length, both directions; numbers stay between 1 and 99."""
    pairs = [(first, first + sign * (length - 1)) for first in range(1, 100) for length in LENGTHS for sign in (1, -1)]
    shown = "".join(f"from {first} to {last}: {_counted(first, last)}\n" for first, last in EXAMPLES)
    return [
        {"prompt": f"{shown}from {first} to {last}:", "answer": _counted(first, last)}
        for first, last in pairs
        if 1 <= last <= 99 and (first, last) not in EXAMPLES
    ]


def _counted(first: int, last: int) -> str:
    sign = 1 if last > first else -1
    return " ".join(map(str, range(first, last + sign, sign)))
