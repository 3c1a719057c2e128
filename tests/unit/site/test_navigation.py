from __future__ import annotations

from typing import Any

from scripts.site.navigation import existing, expanded, listed

ITEMS: list[Any] = ["index.md", {"More": ["a.md", {"Reference": ["reference/*"]}]}]
GENERATED = ["reference/index.md", "reference/b.md", "other.md"]


def test_generated_pages_take_the_place_of_their_folder() -> None:
    expected: list[Any] = ["index.md", {"More": ["a.md", {"Reference": ["reference/index.md", "reference/b.md"]}]}]
    assert expanded(ITEMS, GENERATED) == expected
    assert list(listed(expected)) == ["index.md", "a.md", "reference/index.md", "reference/b.md"]


def test_sections_without_a_page_are_left_out() -> None:
    assert existing(ITEMS, frozenset({"index.md"})) == ["index.md"]
    assert existing(ITEMS, frozenset({"a.md"})) == [{"More": ["a.md"]}]
