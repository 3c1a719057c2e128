"""The rows of data files: JSON lines, Parquet, and folders that the `datasets` library saved."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tidemill.core.errors import UserError
from tidemill.core.records import Record

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CURE = "one JSON object per line, as UTF-8"


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, value) of every line that is not blank, lines counted from 1.

    Raises:
        UserError: naming file and line of the first that is not JSON text.
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).rstrip(b"\r\n")
            if text.strip():
                where = f"{path}, line {number}"
                yield where, _parsed(text, where)


def _parsed(line: bytes, where: str) -> Any:
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # an escaped half of a character pair cannot be encoded
    except UnicodeError as error:
        raise UserError("not valid UTF-8 text", where=where, hint="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        fault = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"broken JSON: {fault}", where=where, hint=CURE) from error
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def import_extra(module: str, *, package: str, needed_by: str, extra: str = "tasks") -> Any:
    """The module of an optional package, untyped.

    Args:
        extra: the extra of Tidemill that brings it.

    Raises:
        UserError: with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{needed_by} needs the package {package} ({error})", hint=f'pip install "tidemill[{extra}]"'
        ) from error


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
            hint="write it again, or rename a file of JSON lines to .jsonl",
        ) from error


STATE = "state.json"


def read_saved(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, fields) of every row of a folder written by `save_to_disk`, counted from 0. Nothing is fetched.

    Raises:
        UserError: `datasets` is not installed, or the folder is none of its own, holds several splits or is damaged.
    """
    if not (path / STATE).is_file():
        raise _no_data_set(path)
    datasets = import_extra("datasets", package="datasets", needed_by="reading a saved data set", extra="data")
    try:
        # As Arrow tables: its own format would decode images and sounds, which nobody asked for.
        saved = datasets.load_from_disk(str(path)).with_format("arrow")
    except Exception as error:  # whatever a damaged file makes of it
        raise UserError(
            f"the saved data set cannot be loaded: {type(error).__name__}: {error}",
            where=str(path),
            hint="save it again with save_to_disk, at least one row of it",
        ) from error
    number = 0
    for table in saved.iter(batch_size=BATCH_ROWS):
        for row in table.to_pylist():
            yield f"{path}, row {number} (from 0)", row
            number += 1


def _no_data_set(path: Path) -> UserError:
    if splits := sorted(each.name for each in path.iterdir() if (each / STATE).is_file()):
        named = " or ".join(str(path / split) for split in splits)
        return UserError(f"holds several splits: {', '.join(splits)}", where=str(path), hint=f"give one: {named}")
    files = sorted(each.name for each in path.iterdir() if each.suffix in (".parquet", ".jsonl", ".json"))
    hint = f"give one of its files, {files[0]}" if files else "give a file, or a folder written by save_to_disk"
    return UserError("is no folder that `datasets` saved (it has no state.json)", where=str(path), hint=hint)


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


def read_rows(path: Path, *, section: str, shape: str) -> Iterator[Row]:
    """The rows of a file or folder, one at a time.

    Args:
        section: of the configuration that names the file: "task" or "data".
        shape: what a row looks like, for the hints.

    Raises:
        UserError: naming file and place, when it cannot be read, has no rows or something else than rows in it.
    """
    if not path.exists():
        keys = f"check {section}.path and {section}.held_out_path"
        raise UserError("cannot read the data: No such file or folder", where=str(path), hint=keys)
    read = READERS[detected_format(path)]
    empty = True
    try:
        for where, value in read(path):
            if not isinstance(value, dict):
                raise UserError(f"expected a JSON object, found {type(value).__name__}", where=where, hint=shape)
            empty = False
            yield Row(fields=value, where=where)
    except OSError as error:
        what = f"cannot read the data: {error.strerror or error}"
        raise UserError(what, where=str(path), hint=f"check {section}.path, {section}.held_out_path") from error
    if empty:
        raise UserError("there are no rows in it", where=str(path), hint=shape)


def detected_format(path: Path) -> str:
    """By what the path is; the content has the last word when it is read."""
    if path.is_dir():
        return "datasets"
    return "parquet" if path.suffix.lower() == ".parquet" else "jsonl"
