from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.errors import UserError
from tidemill.pool.traces import parse_trace, read_trace

CSV = "0,0\n120,0\n120,4\n\n150.5,4\r\n150.5,1\n"
JSON = '{"metadata": {"gap_seconds": 300, "zone": "a"}, "data": [0, 0, 16, 16, 8]}'


def test_csv() -> None:
    trace = parse_trace(CSV, source="t.csv")
    assert trace.steps == ((0.0, 0), (120.0, 4), (150.5, 1))
    assert trace.end_s == 150.5


@pytest.mark.parametrize("heading", ["seconds,count", "Seconds, Count", "\nSECONDS,COUNT\n"])
def test_csv_with_a_heading(heading: str) -> None:
    assert parse_trace(f"{heading}\n{CSV}", source="t.csv") == parse_trace(CSV, source="t.csv")


def test_json() -> None:
    trace = parse_trace(JSON, source="t.json")
    assert trace.steps == ((0.0, 0), (600.0, 16), (1200.0, 8))
    assert trace.end_s == 1500.0  # the last count was measured too


def test_files_with_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(CSV)
    (tmp_path / "b").write_bytes(b"\xef\xbb\xbf" + JSON.encode())
    assert read_trace(tmp_path / "a") == parse_trace(CSV, source="")
    assert read_trace(tmp_path / "b") == parse_trace(JSON, source="")


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "t", "the file is empty"),
        (" \n\n", "t", "the file is empty"),
        ("0,0\nten,4\n", "t:2", "'ten' is not a number of seconds"),
        ("seconds,count\n0,0\nten,4\n", "t:3", "'ten' is not a number of seconds"),
        ("seconds,count\nseconds,count\n0,0\n", "t:2", "'seconds' is not a number of seconds"),
        ("0,0\nseconds,count\n", "t:2", "'seconds' is not a number of seconds"),
        ("count,seconds\n0,0\n", "t:1", "'count' is not a number of seconds"),
        ("seconds,count\n", "t", "no lines below the heading"),
        ("0,0\n\n5,four\n", "t:3", "'four' is not a whole number of machines"),
        ("0,0\n5,4.5\n", "t:2", "'4.5' is not a whole number of machines"),
        ("0,0\n5\n", "t:2", "expected two numbers, found '5'"),
        ("0,0,1\n", "t:1", "expected two numbers, found '0,0,1'"),
        ("0,0\n9,1\n8,2\n", "t:3", "time decreases from 9 to 8"),
        ("0,3\n5,-1\n", "t:2", "negative count -1"),
        ("nan,3\n", "t:1", "'nan' is not a number of seconds"),
        ("-1,3\n", "t:1", "-1 is a negative time"),
        ("0,3\n60,2\n30,1\n", "t:3", "time decreases from 60 to 30"),
        ("1e999,3\n", "t:1", "'1e999' is not a number of seconds"),
        ('{"metadata":\n {"gap_seconds": 300},\n "data": [1,}', "t:3", "invalid JSON"),
        ("[1, 2]", "t", "no metadata.gap_seconds above 0"),
        ('{"data": [1]}', "t", "no metadata.gap_seconds above 0"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "t", "no metadata.gap_seconds above 0"),
        ('{"metadata": {"gap_seconds": -5}, "data": [1]}', "t: metadata.gap_seconds", "-5 is a negative gap"),
        ('{"metadata": {"gap_seconds": true}, "data": [1]}', "t", "no metadata.gap_seconds above 0"),
        ('{"metadata": {"gap_seconds": NaN}, "data": [1]}', "t", "no metadata.gap_seconds above 0"),
        ('{"metadata": {"gap_seconds": 300}}', "t", "no list `data`"),
        ('{"metadata": {"gap_seconds": 300}, "data": {}}', "t", "no list `data`"),
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "t", "`data` is empty"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, -2]}', "t: data[1]", "-2 is not a number of machines"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, 2, 1.5]}', "t: data[2]", "1.5 is not a number of machines"),
        ('{"metadata": {"gap_seconds": 300}, "data": [true]}', "t: data[0]", "true is not a number of machines"),
        ('{"metadata": {"gap_seconds": 300}, "data": [[1]]}', "t: data[0]", "[1] is not a number of machines"),
    ],
)
def test_an_error_names_file_and_line_and_has_a_hint(text: str, where: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_trace(text, source="t")
    assert caught.value.where == where
    assert caught.value.what.startswith(what)
    assert caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(UserError, match="cannot read the capacity trace") as caught:
            read_trace(path)
        assert (caught.value.where, caught.value.exit_code) == (str(path), 2)
    (tmp_path / "latin").write_bytes(b"0,\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        read_trace(tmp_path / "latin")
