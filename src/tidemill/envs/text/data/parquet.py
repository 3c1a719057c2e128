"""Rows from Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError
from tidemill.envs.text.extras import import_extra

BATCH_ROWS = 1024
"""Rows decoded at once."""


def read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, fields) of every row, counted from 0 as tables do.

    Raises:
        UserError: pyarrow is not installed, or the file is damaged or something else.
        OSError: the file cannot be read.
    """
    arrow = import_extra("pyarrow", package="pyarrow", needed_by="reading Parquet", extra="data")
    parquet = import_extra("pyarrow.parquet", package="pyarrow", needed_by="reading Parquet", extra="data")
    number = 0
    try:
        with path.open("rb") as stream, parquet.ParquetFile(stream) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for row in batch.to_pylist():
                    yield f"{path}, row {number} (from 0)", row
                    number += 1
    except arrow.ArrowException as error:
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise UserError(
            f"not a Parquet file that can be read: {reason}",
            where=str(path),
            cure="write it again, or name its format (jsonl, parquet, datasets)",
        ) from error
