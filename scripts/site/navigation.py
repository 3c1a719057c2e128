"""The navigation of zensical.toml: its pages, with generated ones in the place of FOLDER/*."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Item: TypeAlias = "str | Mapping[str, Sequence[Item]]"
ALL = "/*"


def expanded(items: Sequence[Item], generated: Sequence[str]) -> list[Any]:
    """The navigation with the generated pages, in their order.

    Args:
        items: pages, and tables of one title and its items.
        generated: names of the generated pages: `reference/api/index.md`.
    """
    pages = list[Any]()
    for item in items:
        if isinstance(item, str):
            folder = item.removesuffix("*")
            pages += [name for name in generated if name.startswith(folder)] if item.endswith(ALL) else [item]
        else:
            pages += [{title: expanded(below, generated)} for title, below in item.items()]
    return pages


def listed(items: Sequence[Item]) -> Iterator[str]:
    """The pages of a navigation."""
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            for below in item.values():
                yield from listed(below)


def existing(items: Sequence[Item], names: frozenset[str]) -> list[Any]:
    """The navigation without pages that do not exist and without sections that lose all of theirs."""
    pages = list[Any]()
    for item in items:
        if isinstance(item, str):
            pages += [item] if item in names else []
        else:
            pages += [{title: kept} for title, below in item.items() if (kept := existing(below, names))]
    return pages
