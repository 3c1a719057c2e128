"""The same rows as JSON lines, as Parquet and as a folder that `datasets` saved; and readers of every row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from tidemill.data.row_files import open_rows, rows_of
from tidemill.data.rows import to_demonstration, to_item, to_pair

FORMATS = ("jsonl", "parquet", "datasets")


def write(folder: Path, data_format: str, rows: Sequence[dict[str, Any]], name: str = "rows") -> Path:
    """The path of the file or folder written."""
    if data_format == "jsonl":
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif data_format == "parquet":
        path = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(_filled(rows)), path)
    else:
        path = folder / name
        Dataset.from_list(_filled(rows)).save_to_disk(path)
    return path


def _filled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every column in every row, as tables have them."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def read(parse: Callable[..., Any], path: Path) -> Iterator[Any]:
    for row in rows_of(open_rows(path, section="data"), section="data", shape="a row looks like this"):
        yield parse(row, columns={}, system_prompt="")


read_items, read_demonstrations, read_pairs = (partial(read, parse) for parse in (to_item, to_demonstration, to_pair))
