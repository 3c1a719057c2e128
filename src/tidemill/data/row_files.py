"""Files of rows: JSON Lines, Parquet, folders that `datasets` saved, and data sets of the Hugging Face Hub."""

from __future__ import annotations

import importlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tidemill.config.addresses import HUB
from tidemill.core.errors import UserError, exception_text
from tidemill.core.folders import similar_path
from tidemill.core.packages import install_command
from tidemill.core.records import Record, decode_json

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CURE = "one JSON object per line, as UTF-8"
ARRAY_CURE = (
    'one JSON object per line; of an array: `pandas.read_json(...).to_json("rows.jsonl", orient="records", lines=True)`'
)
BATCH_ROWS = 1024
"""Rows decoded at a time."""
STATE = "state.json"
HUB_NAME = re.compile(r"hub:(?P<name>[^@/#]+/[^@/#]+)(@(?P<revision>[^/#]+))?(/(?P<subset>[^#]+))?(#(?P<split>.+))?")
GIVEN_AS = "given_as.json"
"""Beside rows that a Python call saved: the arguments that they were given as, by file name."""


def name_of_rows(path: Path) -> str:
    """How the user knows the rows at a path: as an argument of a Python call ("data"), or by their path."""
    try:
        return str(decode_json((path.parent / GIVEN_AS).read_bytes(), dict).get(path.name, path))
    except (OSError, msgspec.DecodeError):
        return str(path)


class DataRow(Record):
    """One row."""

    fields: dict[str, Any]
    where: str  # "file, line 3", for tables "file, row 2 (from 0)", for rows of a Python call "data[2]"
    number: int = 0  # of the line from 1, or of the row from 0
    locator: int = 0  # finds the row again: the byte offset of the line, or the number of the row

    def get(self, name: str) -> Any:
        """A field's value; None if it is missing, null or NaN (tables have every column in every row)."""
        value = self.fields.get(name)
        return None if isinstance(value, float) and math.isnan(value) else value


class RowFile(ABC):
    """Rows in order, and single rows by their locator."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = name_of_rows(path)

    @property
    @abstractmethod
    def stored_in(self) -> list[Path]:
        """The files on this machine that hold the rows."""

    @abstractmethod
    def values(self) -> Iterator[tuple[int, int, Any]]:
        """(number, locator, JSON value) of every row.

        Raises:
            UserError: the file is damaged, or a package is missing.
            OSError: it cannot be read.
        """

    @abstractmethod
    def fetch(self, locator: int) -> Any:
        """The value of one row. Raises OSError: it cannot be read."""

    def where(self, number: int) -> str:
        """The location of a row, for messages."""
        return f"{self.path}, row {number} (from 0)"


class JsonLines(RowFile):
    @property
    def stored_in(self) -> list[Path]:
        return [self.path]

    def where(self, number: int) -> str:
        # A Python call saves each row as one line.
        return f"{self.path}, line {number}" if self.name == str(self.path) else f"{self.name}[{number - 1}]"

    def values(self) -> Iterator[tuple[int, int, Any]]:
        """Blank lines are skipped, but they count."""
        offset = 0
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).rstrip(b"\r\n")
                if text.strip():
                    yield number, offset, _parsed(text, self.where(number))
                offset += len(line)

    def fetch(self, locator: int) -> Any:
        with self.path.open("rb") as stream:
            stream.seek(locator)
            return _parsed(stream.readline().removeprefix(BYTE_ORDER_MARK), self.name)


def _parsed(line: bytes, where: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(line.decode(), parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates
    except UnicodeError as error:
        raise UserError("not valid UTF-8 text", where=where, hint="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        fault = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        hint = ARRAY_CURE if line.lstrip().startswith(b"[") else CURE
        raise UserError(f"broken JSON: {fault}", where=where, hint=hint) from error
    return value


class ArrowRows(RowFile):
    """Rows of a `datasets.Dataset`, which maps its files into memory."""

    @cached_property
    def data(self) -> Any:
        """As Arrow tables, because the default format decodes images and audio."""
        return self._loaded().with_format("arrow")

    @abstractmethod
    def _loaded(self) -> Any: ...

    @property
    def stored_in(self) -> list[Path]:
        return [Path(each["filename"]) for each in self.data.cache_files]

    def values(self) -> Iterator[tuple[int, int, Any]]:
        return _numbered(self.data.iter(batch_size=BATCH_ROWS))

    def fetch(self, locator: int) -> Any:
        return self.data[locator].to_pylist()[0]


def _numbered(batches: Iterable[Any]) -> Iterator[tuple[int, int, Any]]:
    for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches)):
        yield number, number, row


class Parquet(ArrowRows):
    @property
    def stored_in(self) -> list[Path]:
        return [self.path]

    def _loaded(self) -> Any:
        datasets = import_extra("datasets", package="datasets", needed_by="indexing Parquet", extra="data")
        return datasets.Dataset.from_parquet(str(self.path))

    def values(self) -> Iterator[tuple[int, int, Any]]:
        arrow = import_extra("pyarrow", package="pyarrow", needed_by="reading Parquet", extra="data")
        parquet = import_extra("pyarrow.parquet", package="pyarrow", needed_by="reading Parquet", extra="data")
        try:
            with self.path.open("rb") as stream, parquet.ParquetFile(stream) as file:
                yield from _numbered(file.iter_batches(batch_size=BATCH_ROWS))
        except arrow.ArrowException as error:
            reason = str(error).strip().partition("\n")[0][:200]
            hint = "write it again, or rename a file of JSON lines to .jsonl"
            raise UserError(f"not a readable Parquet file: {reason}", where=str(self.path), hint=hint) from error


class SavedFolder(ArrowRows):
    """A folder written by `save_to_disk`."""

    def _loaded(self) -> Any:
        where = str(self.path)
        if not (self.path / STATE).is_file():
            inside = sorted(self.path.iterdir())
            if splits := [each for each in inside if (each / STATE).is_file()]:
                what = f"holds several splits: {', '.join(each.name for each in splits)}"
                raise UserError(what, where=where, hint=f"give one: {' or '.join(map(str, splits))}")
            files = [each.name for each in inside if each.suffix in (".parquet", ".jsonl", ".json")]
            hint = f"give one of its files, {files[0]}" if files else "give a file, or a folder written by save_to_disk"
            raise UserError("is not a folder that `datasets` saved (it has no state.json)", where=where, hint=hint)
        datasets = import_extra("datasets", package="datasets", needed_by="reading a saved data set", extra="data")
        try:
            return datasets.load_from_disk(where)
        except Exception as error:  # a damaged file can raise anything
            what = f"the saved data set cannot be loaded: {exception_text(error)}"
            hint = "save it again with save_to_disk; it needs at least one row"
            raise UserError(what, where=where, hint=hint) from error


class HubRows(ArrowRows):
    """A data set of the Hugging Face Hub, `hub:OWNER/NAME[@REVISION][/SUBSET][#SPLIT]`; the split is "train" unless it
    is named. `datasets` downloads it once, and runs no code from it."""

    def _loaded(self) -> Any:
        datasets = import_extra("datasets", package="datasets", needed_by="reading a hub data set", extra="data")
        parts = HUB_NAME.fullmatch(str(self.path))
        if parts is None:
            hint = "write hub:OWNER/NAME, hub:OWNER/NAME/SUBSET or hub:OWNER/NAME@REVISION/SUBSET#SPLIT"
            raise UserError("is not the name of a hub data set", where=str(self.path), hint=hint)
        try:
            return datasets.load_dataset(
                parts["name"], parts["subset"], split=parts["split"] or "train", revision=parts["revision"]
            )
        except Exception as error:  # network, permission, unknown subset or split
            hint = "check the name, the subset, the split and HF_TOKEN, or save it to a folder with save_to_disk"
            raise UserError(f"cannot be loaded: {exception_text(error)}", where=str(self.path), hint=hint) from error


def open_rows(path: Path, *, section: str) -> RowFile:
    """The rows at a path.

    Args:
        section: of the configuration that names the path: "task" or "data".

    Raises:
        UserError: there is no such file or folder.
    """
    if str(path).startswith(HUB):
        return HubRows(path)
    if not path.exists():
        raise UserError("cannot read the data: No such file or folder", where=str(path), hint=_elsewhere(path, section))
    if path.is_dir():
        return SavedFolder(path)
    if path.suffix.lower() in (".csv", ".tsv"):
        hint = 'save it as JSONL: `pandas.read_csv(...).to_json("rows.jsonl", orient="records", lines=True)`'
        raise UserError("CSV files are not read", where=str(path), hint=hint)
    if path.suffix.lower() in (".gz", ".zst", ".bz2", ".xz", ".zip"):
        raise UserError("compressed files are not read", where=str(path), hint="unpack it and name the unpacked file")
    return Parquet(path) if path.suffix.lower() == ".parquet" else JsonLines(path)


def _elsewhere(missing: Path, section: str) -> str:
    """A hint for a path where there is nothing."""
    if "*" in missing.name:
        return f"name one file, or several as {section}.sources"
    if similar := similar_path(missing, files=True):
        return similar
    if not missing.suffix and not missing.parent.exists():
        return f"check {section}.path; a data set of the hub is hub:{missing.parent.name}/{missing.name}"
    return f"check {section}.path and {section}.held_out_path"


def rows_of(file: RowFile, *, section: str, shape: str) -> Iterator[DataRow]:
    """The rows of a file, one at a time.

    Args:
        section: as in `open_rows`.
        shape: an example of a row, for the hints.

    Raises:
        UserError: the file cannot be read, is empty, or has a row that is not an object; names file and row.
    """
    empty = True
    try:
        for number, locator, value in file.values():
            if not isinstance(value, dict):
                what = f"expected a JSON object, found {type(value).__name__}"
                raise UserError(what, where=file.where(number), hint=ARRAY_CURE if isinstance(value, list) else shape)
            empty = False
            yield DataRow(fields=value, where=file.where(number), number=number, locator=locator)
    except OSError as error:
        what = f"cannot read the data: {error.strerror or error}"
        raise UserError(what, where=file.name, hint=f"check {section}.path, {section}.held_out_path") from error
    if empty:
        raise UserError("the file has no rows", where=file.name, hint=shape)


def import_extra(module: str, *, package: str, needed_by: str, extra: str = "tasks") -> Any:
    """Import a module of an optional package.

    Args:
        extra: the extra of Tidemill that installs it.

    Raises:
        UserError: it is not installed; with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{needed_by} needs the package {package} ({error})", hint=install_command(extra)) from error
