"""What TRL, verl, OpenRLHF and prime-rl call Tidemill's settings: `foreign_names.toml`, look-ups in it, and its page."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("foreign_names.toml")
BELOW = ".*"
"""Ends the name of a row that stands for every name below."""
MAX_MEANINGS = 2  # of one name, in a hint


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignName:
    """A setting of another framework."""

    framework: str
    place: str  # the class or section that has it
    name: str
    ours: tuple[str, ...]  # Tidemill's keys; empty: there is none
    note: str  # how the value changes; without a key: why, or what to do instead

    @property
    def leaf(self) -> str:
        return self.name.removesuffix(BELOW).rpartition(".")[2]

    @property
    def meaning(self) -> str:
        """`is batch.group_size`, `is sampling.top_k: training needs 0`, `has no counterpart: ...`"""
        verb = f"is {' and '.join(self.ours)}" if self.ours else "has no counterpart"
        return f"{verb}: {self.note}" if self.note else verb


@cache
def foreign_names() -> tuple[ForeignName, ...]:
    """Every row of the table, one for each name, in its order."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(
        ForeignName(framework=framework, place=place, name=name, ours=tuple(keys.split()), note=note)
        for framework, places in tables.items()
        for place, rows in places.items()
        for names, value in rows.items()
        for keys, note in [(value, "") if isinstance(value, str) else value]
        for name in names.split()
    )


def ours_of(name: str | Sequence[str], *, framework: str = "") -> tuple[ForeignName, ...]:
    """What a name of another framework is here; empty if none of them has it.

    The whole name counts first (`num_generations`, `actor_rollout_ref.rollout.n`), then its end (`rollout.n`,
    `kl_coef`), then the last part of a longer one (`batch.num_generations`).

    Args:
        name: with or without leading dashes, with - or _ between words; or the parts of a dotted name.
        framework: "TRL", "verl", "OpenRLHF" or "prime-rl"; empty: all of them.
    """
    text = name if isinstance(name, str) else ".".join(name)
    wanted = text.lstrip("-+").replace("-", "_").lower()
    rows = [row for row in foreign_names() if framework in ("", row.framework)]
    names = [(row, row.name.lower()) for row in rows]
    leaf = wanted.rpartition(".")[2]
    return (
        tuple(row for row, known in names if known == wanted or _is_below(wanted, known))
        or tuple(row for row, known in names if known.endswith(f".{wanted}"))
        or tuple(row for row, known in names if known == leaf)
        or tuple(row for row, known in names if known.endswith(f".{leaf}"))
    )


def _is_below(name: str, pattern: str) -> bool:
    return pattern.endswith(BELOW) and name.startswith(pattern.removesuffix("*"))


def explained(rows: Sequence[ForeignName]) -> str:
    """One sentence of what a name is here: `TRL's num_generations is batch.group_size`."""
    first = rows[0]
    meanings = {row.ours: row for row in reversed(rows)}  # by key, the first row that has it
    if len(meanings) == 1:
        return f"{first.framework}'s {first.name} {first.meaning}"
    same_framework = all(row.framework == first.framework for row in meanings.values())
    shown = sorted(meanings.values(), key=rows.index)[:MAX_MEANINGS]
    if same_framework and len({row.name for row in shown}) == 1:
        places = [f"{' and '.join(row.ours) or 'nothing'} ({row.place})" for row in shown]
        return f"{first.framework}'s {first.name} is {' or '.join(places)}"
    return "; ".join(f"{row.framework}'s {row.name} {row.meaning}" for row in shown)
