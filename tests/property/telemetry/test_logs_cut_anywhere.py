"""Wherever a kill cuts a log, what was whole stays and the next session writes on a clean line."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidemill.telemetry.jsonl import JsonlWriter, encode, read_lines

RECORDS = st.lists(
    st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(-9, 9) | st.floats(-1e3, 1e3), max_size=3),
    max_size=6,
)


@given(records=RECORDS, cut=st.integers(0, 400))
def test_complete_lines_survive_truncation_anywhere(records: list[dict[str, Any]], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        lines = [encode(record) + b"\n" for record in records]
        data = b"".join(lines)[: max(0, sum(map(len, lines)) - cut)]
        path.write_bytes(data)
        whole, length = 0, 0
        while whole < len(lines) and length + len(lines[whole]) <= len(data):
            length += len(lines[whole])
            whole += 1
        writer = JsonlWriter(path)
        writer.write({"next": True})
        writer.close()
        assert [record for _, record in read_lines(path)] == [*records[:whole], {"next": True}]
        assert path.read_bytes() == b"".join(lines[:whole]) + b'{"next":true}\n'
