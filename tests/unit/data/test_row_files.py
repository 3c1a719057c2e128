"""Three formats, the same rows; and files that are none of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from tests.unit.data.data_files import FORMATS, write
from tidemill.core.errors import UserError
from tidemill.data.row_files import DataRow, open_rows, rows_of

ROWS = [
    {"prompt": "2+2=", "answer": "4", "level": 1},
    {"prompt": "2+3=", "answer": "5", "level": 2},
    {"prompt": "naïve – ½\n", "answer": "6", "level": 3},
]


def read(path: Path) -> list[DataRow]:
    return list(rows_of(open_rows(path, section="data"), section="data", shape="a row looks like this"))


@pytest.mark.parametrize("data_format", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, data_format: str) -> None:
    path = write(tmp_path, data_format, ROWS)
    assert [row.fields for row in read(path)] == ROWS
    second = f"{path}, line 2" if data_format == "jsonl" else f"{path}, row 1 (from 0)"
    assert read(path)[1].where == second
    file = open_rows(path, section="data")
    assert [file.fetch(row.locator) for row in read(path)] == ROWS


@pytest.mark.parametrize("data_format", FORMATS)
def test_rows_beyond_one_decoded_batch_keep_their_numbers(tmp_path: Path, data_format: str) -> None:
    rows = read(write(tmp_path, data_format, [{"prompt": str(number)} for number in range(2500)]))
    assert [row.fields["prompt"] for row in rows] == [str(number) for number in range(2500)]
    assert rows[2499].where.endswith("line 2500" if data_format == "jsonl" else "row 2499 (from 0)")


def test_null_fields_of_a_table_are_missing(tmp_path: Path) -> None:
    row = read(write(tmp_path, "parquet", [{"prompt": "q", "margin": float("nan"), "answer": None}]))[0]
    assert (row.get("prompt"), row.get("margin"), row.get("answer"), row.get("never")) == ("q", None, None, None)


def test_a_file_called_parquet_that_is_none(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", ROWS).rename(tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="not a readable Parquet file") as caught:
        read(path)
    assert caught.value.where == str(path)


def test_a_torn_parquet_file(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read(path)


def test_a_torn_saved_folder(tmp_path: Path) -> None:
    path = write(tmp_path, "datasets", ROWS)
    (arrow,) = path.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:40])
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        read(path)
    assert caught.value.where == str(path)


def test_a_saved_folder_with_several_splits_names_them(tmp_path: Path) -> None:
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "both")
    with pytest.raises(UserError, match="holds several splits: test, train") as caught:
        read(tmp_path / "both")
    assert caught.value.hint == f"give one: {tmp_path / 'both' / 'test'} or {tmp_path / 'both' / 'train'}"
    assert len(read(tmp_path / "both" / "train")) == 3


def test_a_folder_of_files_names_one(tmp_path: Path) -> None:
    write(tmp_path, "parquet", ROWS)
    with pytest.raises(UserError, match=r"not a folder that `datasets` saved") as caught:
        read(tmp_path)
    assert caught.value.hint == "give one of its files, rows.parquet"


def test_a_table_without_rows(tmp_path: Path) -> None:
    Dataset.from_dict({"prompt": []}).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(UserError, match="the file has no rows"):
        read(tmp_path / "none.parquet")


def test_without_the_extra_the_hint_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="reading Parquet needs the package pyarrow") as caught:
        read(path)
    assert '"pyarrow>=' in caught.value.hint


def test_json_lines_need_neither_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "jsonl", ROWS)
    for package in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    assert len(read(path)) == 3


def test_a_path_that_is_not_there_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file or folder") as caught:
        read(tmp_path / "nowhere.parquet")
    assert "data.path" in caught.value.hint
