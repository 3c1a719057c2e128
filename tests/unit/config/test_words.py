from __future__ import annotations

import pytest

from tidemill.core.formatting import counted


@pytest.mark.parametrize(
    ("value", "noun", "text"),
    [
        (1, "sample", "1 sample"),
        (1280, "sample", "1,280 samples"),
        (2, "microbatch", "2 microbatches"),
        (2, "epoch", "2 epochs"),
    ],
)
def test_counted(value: int, noun: str, text: str) -> None:
    assert counted(value, noun) == text
