"""The rows of a data file, whatever its format: fields by name, and the place to name when one is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tidemill.config.data import DataFormat
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.envs.text.data.json_lines import read_json_lines
from tidemill.envs.text.data.parquet import read_parquet
from tidemill.envs.text.data.saved import read_saved


class Row(Record):
    """One row."""

    fields: dict[str, Any]
    where: str  # "file, line 3"; of a table "file, row 2 (from 0)"

    def get(self, name: str) -> Any:
        """A field's value; None where it is absent or empty.

        A table has every column in every row: what a row lacks is null there, or NaN where numbers were missing.
        """
        value = self.fields.get(name)
        return None if isinstance(value, float) and math.isnan(value) else value


Rows = Callable[[Path], Iterator[tuple[str, Any]]]
"""(where, JSON value) of every row; raises UserError naming the place that cannot be read."""

READERS: dict[str, Rows] = {"jsonl": read_json_lines, "parquet": read_parquet, "datasets": read_saved}


def read_rows(path: Path, data_format: DataFormat, *, section: str, shape: str) -> Iterator[Row]:
    """The rows of a file or folder, one at a time.

    Args:
        section: of the configuration that names the file: "task" or "data".
        shape: what a row looks like, for the cures.

    Raises:
        UserError: naming file and place, when it cannot be read, has no rows or something else than rows in it.
    """
    if not path.exists():
        keys = f"check {section}.path and {section}.held_out_path"
        raise UserError("cannot read the data: No such file or folder", where=str(path), cure=keys)
    read = READERS[detected_format(path) if data_format == "auto" else data_format]
    empty = True
    try:
        for where, value in read(path):
            if not isinstance(value, dict):
                raise UserError(f"expected a JSON object, found {type(value).__name__}", where=where, cure=shape)
            empty = False
            yield Row(fields=value, where=where)
    except OSError as error:
        what = f"cannot read the data: {error.strerror or error}"
        raise UserError(what, where=str(path), cure=f"check {section}.path, {section}.held_out_path") from error
    if empty:
        raise UserError("there are no rows in it", where=str(path), cure=shape)


def detected_format(path: Path) -> DataFormat:
    """By what the path is; the content has the last word when it is read."""
    if path.is_dir():
        return "datasets"
    return "parquet" if path.suffix.lower() == ".parquet" else "jsonl"
