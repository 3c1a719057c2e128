"""Recipe prefixes for tests: a character model whose steps take milliseconds."""

from __future__ import annotations


def char_task(*, layers: int = 1, hidden_size: int = 32) -> str:
    """The text of [model] and [task]; more keys of the task can follow."""
    return f"""\
[model]
source = "char"
[model.char]
alphabet = "0123456789+=\\n"
hidden_size = {hidden_size}
layers = {layers}
[task]
kind = "arithmetic"
shots = 0
"""
