"""Pages of the site whose source names no description."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.site.pages import Page
from scripts.site.stage import with_description

TEXT = "# Title\n\nHow to *do* it,\nwith a [link](a.md). More.\n\n## Section\n"


@pytest.mark.parametrize(
    ("text", "description"),
    [
        (TEXT, "How to do it, with a link."),
        (f"---\nkeywords: [a, b]\n---\n{TEXT}", "How to do it, with a link."),
        (f"---\ndescription: Its own.\n---\n{TEXT}", "Its own."),
        ("# Title\n\n| a | b |\n", None),
        ("# Title\n\n## Section\n\nNot this.\n", None),
    ],
)
def test_the_first_sentence_of_a_page_describes_it(text: str, description: str | None) -> None:
    found = Page(Path(), with_description(text))
    assert found.front_matter.get("description") == description
    assert found.text.endswith(text.partition("---\n#")[2] or text)
    assert ("keywords" in found.front_matter) == ("keywords" in text)
