"""Counts as people read them."""

from __future__ import annotations


def number(value: int) -> str:
    return f"{value:,}"


def counted(value: int, noun: str) -> str:
    """`1 sample`, `64 samples`, `2 microbatches`."""
    plural = f"{noun}es" if noun.endswith("batch") else f"{noun}s"
    return f"{number(value)} {noun if value == 1 else plural}"


def doing(value: int, noun: str, verb: str) -> str:
    """`1 GPU learns`, `8 GPUs learn`."""
    return f"{counted(value, noun)} {verb}{'s' if value == 1 else ''}"
