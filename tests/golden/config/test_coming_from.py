from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.config.foreign_names import foreign_names, update_document

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "coming_from.md"


def test_the_tables_of_the_document_are_generated_from_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    if (current := update_document(text)) != text:
        DOCUMENT.write_text(current, encoding="utf-8")
        pytest.fail("the tables of docs/coming_from.md were updated; look at them and run again")
    for framework in {row.framework for row in foreign_names()}:
        assert text.count(f"<!-- {framework}: generated -->") == 1
        assert f"`{next(row.name for row in foreign_names() if row.framework == framework)}`" in text
