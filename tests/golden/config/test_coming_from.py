from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tidemill.config.foreign_names import PAGE, TABLE, foreign_names, update_document

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "coming_from.md"


def test_the_tables_of_the_document_are_generated_from_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    if (current := update_document(text)) != text:
        DOCUMENT.write_text(current, encoding="utf-8")
        pytest.fail("the tables of docs/coming_from.md were updated; look at them and run again")
    for framework in {row.framework for row in foreign_names()}:
        assert text.count(f"<!-- {framework}: generated -->") == 1
    assert [row.name for row in foreign_names() if row.on_page and f"`{row.shown}`" not in text] == []


def test_the_names_of_the_page_are_rows_of_their_place() -> None:
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    listed = {
        (framework, place, name)
        for framework, places in tables.items()
        for place, rows in places.items()
        for name in rows.get(PAGE, "").split()
    }
    assert listed - {(row.framework, row.place, row.shown) for row in foreign_names()} == set()
