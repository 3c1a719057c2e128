"""The ledger's journal on disk: SQLite in WAL mode, flushed to disk at every commit."""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from tidemill.core.errors import UserError
from tidemill.core.protocols import with_deadline
from tidemill.runtime.compute import ComputeThread

T = TypeVar("T")

FORMAT = 5
"""Raised whenever the entries or their names change; stored as SQLite's `user_version`."""
DEADLINE_S = 120.0
PAGE_BYTES = 16384
"""A tick of a busy worker fills about one page; SQLite's default of 4 KiB costs nearly half as much CPU time again."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL, checksum INTEGER NOT NULL, blob BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS entries_by_step ON entries (step);
"""

START_AGAIN = "delete it (and its -wal and -shm files): the run resumes from its last checkpoint"


@dataclass(frozen=True, slots=True)
class _Append:
    blobs: tuple[tuple[int, bytes], ...]  # (step, entry)
    durable: asyncio.Future[None]


class SqliteJournal:
    """Implements `core.protocols.Journal`. Create one with `await SqliteJournal.open(path)`.

    All calls run on one thread. Appends that arrive during a commit share the next commit. After a failed append every
    later one fails too, so that the journal never has a gap.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, thread: ComputeThread, deadline_s: float) -> None:
        self._path, self._connection, self._thread, self._deadline_s = path, connection, thread, deadline_s
        self._pending: list[_Append] = []
        self._flushing: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    @classmethod
    async def open(cls, path: Path, *, deadline_s: float = DEADLINE_S) -> Self:
        """Open or create the file.

        Raises:
            UserError: it cannot be opened, is not a journal, or has another format.
        """
        thread = ComputeThread("tidemill-journal")
        try:
            connection = await with_deadline(
                thread.run(lambda: _open(path)), timeout_s=deadline_s, awaited="the ledger to open", look_at=str(path)
            )
        except BaseException:
            await thread.close(deadline_s)
            raise
        return cls(path, connection, thread, deadline_s)

    async def append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        """Raises UserError: the disk is full or cannot be written."""
        if self._failure is not None:
            raise self._failure
        if not blobs:
            return
        durable = asyncio.get_running_loop().create_future()
        self._pending.append(_Append(tuple(blobs), durable))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush(), name="journal commits")
        await with_deadline(
            durable, timeout_s=self._deadline_s, awaited="the ledger to reach the disk", look_at=str(self._path)
        )

    async def load(self) -> list[tuple[int, bytes]]:
        """Raises UserError: the file is damaged."""
        return await self._run(self._load, "the ledger to be read")

    async def prune(self, through_step: int) -> None:
        await self._run(lambda: self._prune(through_step), "the ledger to shrink")

    async def close(self) -> None:
        """Wait for pending commits, then close the file.

        Raises:
            DeadlineError: the disk did not answer in time.
        """
        if self._flushing is not None:
            await asyncio.wait({self._flushing}, timeout=self._deadline_s)
        await self._run(self._connection.close, "the ledger to close")
        await self._thread.close(self._deadline_s)

    async def _run(self, function: Callable[[], T], awaited: str) -> T:
        return await with_deadline(
            self._thread.run(function), timeout_s=self._deadline_s, awaited=awaited, look_at=str(self._path)
        )

    async def _flush(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await self._thread.run(lambda batch=batch: self._write(batch))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - raised in every task that waits for these entries
                self._failure = error
                batch, self._pending = batch + self._pending, []
            for entry in batch:
                if entry.durable.done():  # its waiter was cancelled
                    continue
                if self._failure is None:
                    entry.durable.set_result(None)
                else:
                    entry.durable.set_exception(self._failure)

    # The methods below run on the journal's thread.

    def _write(self, batch: Sequence[_Append]) -> None:
        rows = [(step, zlib.crc32(blob), blob) for entry in batch for step, blob in entry.blobs]
        with _sqlite_errors(self._path), self._connection:
            self._connection.executemany("INSERT INTO entries (step, checksum, blob) VALUES (?, ?, ?)", rows)

    def _load(self) -> list[tuple[int, bytes]]:
        with _sqlite_errors(self._path):
            rows = self._connection.execute("SELECT step, checksum, blob FROM entries ORDER BY id").fetchall()
        for step, checksum, blob in rows:
            if zlib.crc32(blob) != checksum:
                raise UserError(f"an entry of step {step} is damaged", where=str(self._path), hint=START_AGAIN)
        return [(step, blob) for step, _, blob in rows]

    def _prune(self, through_step: int) -> None:
        with _sqlite_errors(self._path):
            with self._connection:
                self._connection.execute("DELETE FROM entries WHERE step <= ?", (through_step,))
            self._connection.executescript("PRAGMA incremental_vacuum;")  # `execute` would free a single page
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _open(path: Path) -> sqlite3.Connection:
    """Others may read the file at the same time, except on disks without shared memory, as those over a network."""
    with _sqlite_errors(path):
        try:
            return _connect(path, locking_mode="NORMAL")
        except sqlite3.OperationalError:
            return _connect(path, locking_mode="EXCLUSIVE")


def _connect(path: Path, *, locking_mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10.0)
    try:
        connection.execute(f"PRAGMA locking_mode = {locking_mode}")  # before anything is read
        # SQLite ignores these two unless the file is empty.
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        (written,) = connection.execute("PRAGMA user_version").fetchone()
        if written not in (0, FORMAT):  # 0: a new file
            raise UserError(
                f"the journal has format {written}, this version of Tidemill reads format {FORMAT}",
                where=str(path),
                hint="finish the run with the version that wrote it, or start a new run directory",
            )
        connection.executescript(SCHEMA)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    """Raise SQLite errors as UserError with a hint."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        what, hint = _ERRORS.get(code, (f"the ledger cannot be used ({error})", "check the disk and its permissions"))
        raise UserError(what, where=str(path), hint=hint) from error


_RESUME = "run the same command again to resume"
_ERRORS = {
    sqlite3.SQLITE_FULL: ("the disk is full; the ledger cannot be written", f"free some space and {_RESUME}"),
    sqlite3.SQLITE_IOERR: ("the ledger cannot be written (I/O error)", f"check the disk and its quota, then {_RESUME}"),
    sqlite3.SQLITE_READONLY: ("the ledger is read-only", f"make it writable and {_RESUME}"),
    sqlite3.SQLITE_CANTOPEN: ("the ledger cannot be opened", "check that its folder exists and is writable"),
    sqlite3.SQLITE_CORRUPT: ("the ledger is damaged", START_AGAIN),
    sqlite3.SQLITE_NOTADB: ("the ledger is damaged, or is not a ledger", START_AGAIN),
    sqlite3.SQLITE_BUSY: ("another process is using the ledger", f"stop it and {_RESUME}"),
}
