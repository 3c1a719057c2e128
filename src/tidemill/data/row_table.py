"""The distinct rows of one or several files: in memory, or for large files as an index on disk."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import UserError
from tidemill.core.folders import cache_dir
from tidemill.data.prompts import QuestionT, RowFigures, content_id, count_filled, question_number
from tidemill.data.row_files import DataRow, RowFile, open_rows, rows_of
from tidemill.telemetry.jsonl import disk_error, write_atomically

ExampleT = TypeVar("ExampleT")
Progress = Callable[[str], None]

INDEX = np.dtype(
    [
        ("id", "S32"),  # content id
        ("question", "<u8"),  # equal for equal questions
        ("tokens", "<u4"),
        ("number", "<u8"),
        ("locator", "<u8"),
        ("source", "<u1"),
    ]
)
Index = NDArray[Any]
"""[N] of `INDEX`."""
INDEX_FOLDER = "index"
"""Folder of the indexes in `cache_dir()`."""
FORMAT = 4
"""Part of an index's file name; raised when its content changes."""
CHUNK_ROWS = 1 << 16
CHECKED_ROWS = 64
"""Rows of an index that are read again before it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUse(Generic[QuestionT, ExampleT]):
    """How rows become examples."""

    section: str  # of the configuration that names the files: "task" or "data"
    shape: str  # an example of a row, for messages
    parse: Callable[[DataRow], QuestionT]
    encode: Callable[[QuestionT], ExampleT]
    tokens: Callable[[ExampleT], int]
    values: Callable[[QuestionT], Mapping[str, Any]] = lambda _: {}  # that a reward can see, by column
    settings: str = ""  # all that changes the result of `parse`; part of the name of an index


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable(Generic[ExampleT]):
    """Distinct rows.

    Args:
        index: one record per row.
        fetch: by source and locator.
        where: by source and number.
    """

    index: Index
    figures: RowFigures
    in_memory: bool
    fetch: Callable[[int, int], ExampleT]
    where: Callable[[int, int], str]

    def example(self, row: int) -> ExampleT:
        record = self.index[row]
        return self.fetch(int(record["source"]), int(record["locator"]))

    def location(self, row: int) -> str:
        """File and line of a row."""
        record = self.index[row]
        return self.where(int(record["source"]), int(record["number"]))

    def examples(self, rows: NDArray[np.int64]) -> Sequence[ExampleT]:
        """Some rows: a tuple, or a view that reads each row when it is used."""
        view = RowView(self, rows)
        return tuple(view) if self.in_memory else view


class RowView(Sequence[ExampleT]):
    """Rows of a table, read from disk one by one."""

    def __init__(self, table: RowTable[ExampleT], rows: NDArray[np.int64]) -> None:
        self._table, self._rows = table, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> ExampleT: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ExampleT]: ...
    def __getitem__(self, at: int | slice) -> ExampleT | Sequence[ExampleT]:
        if isinstance(at, slice):
            return RowView(self._table, self._rows[at])
        return self._table.example(int(self._rows[at]))


def read_table(
    path: Path, use: RowUse[Any, ExampleT], *, index_above_mb: float, progress: Progress = lambda _: None
) -> RowTable[ExampleT]:
    """The distinct rows of one file.

    Args:
        index_above_mb: a larger file is indexed on disk, in `cache_dir()`; later calls use the index as long as the
            file is unchanged.

    Raises:
        UserError: the file cannot be read, has an invalid row, or the cache folder is not writable.
    """
    file = open_rows(path, section=use.section)
    size_mb = sum(each.stat().st_size for each in file.stored_in) / 2**20
    if size_mb > index_above_mb:
        return _indexed(file, use, progress)
    return table_in_memory(rows_of(file, section=use.section, shape=use.shape), use, where=file.where)


def table_in_memory(
    rows: Iterable[DataRow], use: RowUse[QuestionT, ExampleT], *, where: Callable[[int], str]
) -> RowTable[ExampleT]:
    """The distinct rows of an iterable. Raises UserError: a row is invalid."""
    examples, records, filled = list[ExampleT](), list[tuple[Any, ...]](), Counter[str]()
    for row in rows:
        question = use.parse(row)
        examples.append(use.encode(question))
        records.append(_record(row, question, use.tokens(examples[-1]), locator=len(records)))
        count_filled(filled, use.values(question))
    index = np.array(records, INDEX)
    kept = _first_of_each(index)
    return RowTable(
        index=index[kept],
        figures=RowFigures(rows=len(index), repeated=len(index) - len(kept), filled=filled),
        in_memory=True,
        fetch=lambda _, locator: examples[locator],
        where=lambda _, number: where(number),
    )


def join(tables: Sequence[RowTable[ExampleT]]) -> RowTable[ExampleT]:
    """One table of several sources. Of rows with equal content the first source keeps its own."""
    if len(tables) == 1:
        return tables[0]
    parts = []
    for source, table in enumerate(tables):
        part = np.array(table.index)
        part["source"] = source
        parts.append(part)
    index = np.concatenate(parts)
    kept = _first_of_each(index)
    between = RowFigures(rows=0, repeated=len(index) - len(kept), filled={})
    return RowTable(
        index=index[kept],
        figures=reduce(RowFigures.plus, (table.figures for table in tables), between),
        in_memory=all(table.in_memory for table in tables),
        fetch=lambda source, locator: tables[source].fetch(0, locator),
        where=lambda source, number: tables[source].where(0, number),
    )


def _record(row: DataRow, question: Any, tokens: int, *, locator: int) -> tuple[Any, ...]:
    return (content_id(question).encode(), question_number(question), tokens, row.number, locator, 0)


def _first_of_each(index: Index) -> NDArray[np.int64]:
    """The first row of each content id, in order."""
    return np.sort(np.unique(index["id"], return_index=True)[1])


def _indexed(file: RowFile, use: RowUse[QuestionT, ExampleT], progress: Progress) -> RowTable[ExampleT]:
    path = _index_path(file, use.settings)

    def fetch(_: int, locator: int) -> ExampleT:
        if _index_path(file, use.settings) != path:
            hint = "restore it, and run the same command again"
            raise UserError("the file changed while it was in use", where=file.name, hint=hint)
        value = file.fetch(locator)
        return use.encode(use.parse(DataRow(fields=value, where=file.name, locator=locator)))

    def table(index: Index, figures: RowFigures) -> RowTable[ExampleT]:
        return RowTable(
            index=index, figures=figures, in_memory=False, fetch=fetch, where=lambda _, number: file.where(number)
        )

    if (found := _read_index(path)) and _still_fits(table(*found), use):
        return table(*found)
    try:
        _write_index(path, file, use, progress)
    except OSError as error:
        raise disk_error(error, path) from error
    written = _read_index(path)
    if written is None:
        raise UserError("the index was removed while it was written", where=str(path), hint="run the command again")
    return table(*written)


def _index_path(file: RowFile, settings: str) -> Path:
    """Depends on names, sizes and times of the files, and on how their rows are parsed."""
    stats = [(str(each.absolute()), each.stat().st_size, each.stat().st_mtime_ns) for each in file.stored_in]
    key = hashlib.blake2b(repr((FORMAT, stats, settings)).encode(), digest_size=16).hexdigest()
    return cache_dir() / INDEX_FOLDER / f"{key}.npy"


def _read_index(path: Path) -> tuple[Index, RowFigures] | None:
    try:
        figures = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=RowFigures)
        return np.load(path, mmap_mode="r", allow_pickle=False), figures
    except (OSError, ValueError, msgspec.DecodeError):
        return None  # not written yet, or damaged


def _still_fits(table: RowTable[Any], use: RowUse[Any, Any]) -> bool:
    """Whether rows across the file have the stored numbers of tokens, which depend on the tokenizer."""
    rows = np.unique(np.linspace(0, len(table.index) - 1, CHECKED_ROWS, dtype=np.int64))
    try:
        return all(use.tokens(table.example(int(row))) == int(table.index[row]["tokens"]) for row in rows)
    except UserError:
        return False


def _write_index(path: Path, file: RowFile, use: RowUse[QuestionT, Any], progress: Progress) -> None:
    """Write the distinct rows, then the figures, without which the index counts as missing."""
    filled, records = Counter[str](), list[tuple[Any, ...]]()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as folder:
        every, distinct = Path(folder) / "every", Path(folder) / "distinct.npy"
        with every.open("wb") as stream:
            for number, row in enumerate(rows_of(file, section=use.section, shape=use.shape), 1):
                question = use.parse(row)
                records.append(_record(row, question, use.tokens(use.encode(question)), locator=row.locator))
                count_filled(filled, use.values(question))
                if number % CHUNK_ROWS == 0:
                    progress(f"indexing {file.path.name}: {number} rows")
                    stream.write(np.array(records, INDEX).tobytes())
                    records.clear()
            stream.write(np.array(records, INDEX).tobytes())
        index = np.memmap(every, INDEX, mode="r")
        kept = _first_of_each(index)
        np.save(distinct, index[kept], allow_pickle=False)
        distinct.replace(path)
        figures = RowFigures(rows=len(index), repeated=len(index) - len(kept), filled=filled)
    write_atomically(path.with_suffix(".json"), msgspec.json.encode(figures))
