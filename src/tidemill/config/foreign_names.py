"""What TRL, verl, OpenRLHF and prime-rl call Tidemill's settings: the table, look-ups in it, and its page."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("foreign_names.toml")
BELOW = ".*"
"""Ends the name of a row that stands for every name below."""
PAGE = "page"
"""The key of the names of a place that the page shows."""
VERL_PREFIX = "actor_rollout_ref."
MAX_MEANINGS = 2  # of one name, in a hint


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignName:
    """A setting of another framework."""

    framework: str
    place: str  # the class or section that has it
    name: str
    ours: tuple[str, ...]  # Tidemill's keys; empty: there is none
    note: str  # how the value changes; without a key: why, or what to do instead
    on_page: bool  # whether docs/coming-from/FRAMEWORK.md shows it

    @property
    def shown(self) -> str:
        """The name as users of the framework abbreviate it."""
        return self.name.removeprefix(VERL_PREFIX)

    @property
    def meaning(self) -> str:
        """`is batch.group_size`, `is sampling.top_k: training needs 0`, `has no counterpart: ...`"""
        verb = f"is {listed(self.ours)}" if self.ours else "has no counterpart"
        return f"{verb}: {self.note}" if self.note else verb


@cache
def foreign_names() -> tuple[ForeignName, ...]:
    """Every row of the table, one for each name, in its order."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    found = list[ForeignName]()
    for framework, places in tables.items():
        for place, rows in places.items():
            on_page = rows.pop(PAGE, "").split()
            for names, value in rows.items():
                keys, note = (value, "") if isinstance(value, str) else value
                found += [
                    ForeignName(
                        framework=framework,
                        place=place,
                        name=name,
                        ours=tuple(keys.split()),
                        note=note,
                        on_page=name.removeprefix(VERL_PREFIX) in on_page,
                    )
                    for name in names.split()
                ]
    return tuple(found)


def ours_of(name: str | Sequence[str], *, framework: str = "", certain: bool = False) -> tuple[ForeignName, ...]:
    """What a name of another framework is here; empty if none of them has it.

    The whole name counts first (`num_generations`, `actor_rollout_ref.rollout.n`), then its end (`rollout.n`), then a
    name with something before it (`config.data.max_length`), its last part (`batch.num_generations`), and at last the
    end of longer names (`lr`).

    Args:
        name: with or without leading dashes, with - or _ between words; or the parts of a dotted name.
        framework: "TRL", "verl", "OpenRLHF" or "prime-rl"; empty: all of them.
        certain: not if all they share is the last part of a longer name, such as `path`.
    """
    text = name if isinstance(name, str) else ".".join(name)
    wanted = text.lstrip("-+").replace("-", "_").lower()
    leaf = wanted.rpartition(".")[2]
    rows = [row for row in foreign_names() if framework in ("", row.framework)]
    names = [(row, row.name.lower()) for row in rows]
    matches = [
        [row for row, known in names if known == wanted],
        [row for row, known in names if known.endswith(BELOW) and wanted.startswith(known.removesuffix("*"))],
        [row for row, known in names if known.endswith(f".{wanted}") and "." in wanted],
        [row for row, known in names if "." in known and wanted.endswith(f".{known}")],
        [row for row, known in names if known == leaf],
        [row for row, known in names if known.endswith(f".{leaf}") and not certain],
    ]
    return tuple(next(filter(None, matches), ()))


def explained(rows: Sequence[ForeignName]) -> str:
    """One sentence of what a name is here, from the rows of `ours_of`: `TRL's num_generations is batch.group_size`."""
    rows = [row for row in rows if row.ours] or rows[:1]
    meanings = {row.ours: row for row in reversed(rows)}  # by keys, the first row that has them
    shown = sorted(meanings.values(), key=rows.index)[:MAX_MEANINGS]
    if len(shown) > 1 and len({(row.framework, row.name) for row in shown}) == 1:
        places = " or ".join(f"{listed(row.ours)} ({row.place})" for row in shown)
        return f"{shown[0].framework}'s {shown[0].shown} is {places}"
    if len(shown) > 1:
        return "; ".join(f"{row.framework}'s {row.shown} is {listed(row.ours)}" for row in shown)
    return f"{shown[0].framework}'s {shown[0].shown} {shown[0].meaning}"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`"""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
