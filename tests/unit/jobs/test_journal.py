"""The journal on disk and the fake in memory satisfy one contract; plus the behaviour of the disk alone."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.doubles.journal import MemoryJournal, PowerCut
from tidemill.core.errors import DeadlineError, UserError
from tidemill.core.protocols import Journal
from tidemill.jobs.journal import FORMAT, SqliteJournal

Reopen: TypeAlias = Callable[[], Awaitable[Journal]]


@pytest.fixture(params=["sqlite", "memory"])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    """Opens the journal like a new process, after closing the one opened before."""
    last: list[Journal] = []

    async def open_again() -> Journal:
        if last:
            await last[-1].close()
        if request.param == "sqlite":
            last.append(await SqliteJournal.open(tmp_path / "ledger.sqlite"))
        else:
            earlier = last[-1] if last else None
            assert earlier is None or isinstance(earlier, MemoryJournal)
            last.append(MemoryJournal(earlier.disk if earlier else b""))
        return last[-1]

    return open_again


async def test_entries_come_back_in_the_order_of_appending(reopen: Reopen) -> None:
    journal = await reopen()
    await journal.append([(2, b"a"), (2, b"b")])
    await journal.append([(1, b"")])
    await journal.append([(2, b"\x00\xff" * 100_000)])
    await journal.append([])
    expected = [(2, b"a"), (2, b"b"), (1, b""), (2, b"\x00\xff" * 100_000)]
    assert await journal.load() == expected

    again = await reopen()

    assert await again.load() == expected
    await again.append([(3, b"c")])
    assert await (await reopen()).load() == [*expected, (3, b"c")]
    await (await reopen()).close()


async def test_appends_that_overlap_keep_their_order(reopen: Reopen) -> None:
    journal = await reopen()

    await asyncio.gather(*(journal.append([(1, str(at).encode())]) for at in range(200)))

    assert await journal.load() == [(1, str(at).encode()) for at in range(200)]
    await journal.close()


async def test_pruning_removes_steps_up_to_the_given_one(reopen: Reopen) -> None:
    journal = await reopen()
    for step in (1, 2, 3, 2, 2**62):
        await journal.append([(step, str(step).encode())])

    await journal.prune(2)

    assert await journal.load() == [(3, b"3"), (2**62, b"%d" % 2**62)]
    await journal.append([(4, b"4")])
    again = await reopen()
    assert [step for step, _ in await again.load()] == [3, 2**62, 4]
    await again.close()


@pytest.mark.parametrize("size", range(64))
async def test_memory_torn_anywhere_keeps_whole_entries_and_accepts_more(size: int) -> None:
    journal = MemoryJournal(power_cut_after=size)
    acknowledged = []
    for at in range(9):
        try:
            await journal.append([(at, bytes([at]) * at)])
        except PowerCut:
            break
        acknowledged.append((at, bytes([at]) * at))

    again = MemoryJournal(journal.disk)
    found = await again.load()
    assert found[: len(acknowledged)] == acknowledged
    assert len(found) <= len(acknowledged) + 1
    await again.append([(99, b"next")])

    assert (await MemoryJournal(again.disk).load())[-1] == (99, b"next")


async def test_memory_without_power_does_nothing() -> None:
    journal = MemoryJournal(power_cut_after=0)
    with pytest.raises(PowerCut):
        await journal.append([(1, b"a")])
    with pytest.raises(PowerCut):
        await journal.prune(1)
    assert journal.disk == b""


async def test_memory_damaged_in_place_ends_there() -> None:
    journal = MemoryJournal()
    await journal.append([(1, b"aaaa"), (1, b"bbbb")])
    broken = bytearray(journal.disk)
    broken[-1] ^= 1

    assert await MemoryJournal(bytes(broken)).load() == [(1, b"aaaa")]


# The disk alone.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


async def test_commits_are_flushed_and_shared(path: Path) -> None:
    journal = await SqliteJournal.open(path)
    commits: list[str] = []

    def pragma(name: str) -> object:
        return journal._connection.execute(f"PRAGMA {name}").fetchone()[0]

    assert await journal._thread.run(lambda: (pragma("journal_mode"), pragma("synchronous"))) == ("wal", 2)
    await journal._thread.run(lambda: journal._connection.set_trace_callback(commits.append))
    await asyncio.gather(*(journal.append([(1, b"x")]) for _ in range(100)))

    assert len(await journal.load()) == 100
    assert 1 <= commits.count("COMMIT") <= 3  # the first alone, the others together
    await journal.close()


async def test_a_full_disk_is_a_user_error_and_keeps_accepted_entries(path: Path) -> None:
    journal = await SqliteJournal.open(path)
    await journal.append([(1, b"accepted")])
    await journal._thread.run(lambda: journal._connection.execute("PRAGMA max_page_count = 8"))

    with pytest.raises(UserError, match="the disk is full") as error:
        await journal.append([(1, b"x" * 1_000_000)])
    assert error.value.where == str(path)
    assert "free some space" in str(error.value)
    with pytest.raises(UserError, match="the disk is full"):  # no holes: nothing is accepted after a failure
        await journal.append([(1, b"small")])
    await journal.close()

    again = await SqliteJournal.open(path)
    assert await again.load() == [(1, b"accepted")]
    await again.append([(1, b"more")])
    await again.close()


async def test_a_failure_is_raised_in_every_waiting_append(path: Path) -> None:
    journal = await SqliteJournal.open(path)
    await journal._thread.run(lambda: journal._connection.execute("PRAGMA max_page_count = 8"))

    results = await asyncio.gather(*(journal.append([(1, b"x" * 100_000)]) for _ in range(5)), return_exceptions=True)

    assert {type(result) for result in results} == {UserError}
    await journal.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"this is not a database at all" * 100, "not a ledger"), (b"SQLite format 3\x00" + b"\x07" * 5000, "ledger")],
)
async def test_a_file_that_is_no_journal_is_refused_by_name(path: Path, content: bytes, message: str) -> None:
    overwrite_whole(path, content)

    with pytest.raises(UserError, match=message) as error:
        await SqliteJournal.open(path)
    assert error.value.where == str(path)


async def filled(path: Path, entries: int = 2000) -> None:
    journal = await SqliteJournal.open(path)
    await journal.append([(1, bytes([at % 256]) * 200) for at in range(entries)])
    await journal.prune(0)  # moves everything from the write-ahead log into the file
    await journal.close()


async def load_all(path: Path) -> None:
    journal = await SqliteJournal.open(path)
    try:
        await journal.load()
    finally:
        await journal.close()


def overwrite_whole(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def find(path: Path, wanted: bytes) -> int:
    return path.read_bytes().index(wanted)


def size(path: Path) -> int:
    return path.stat().st_size


async def test_a_damaged_page_is_detected(path: Path) -> None:
    await filled(path)
    overwrite(path, 4096 * 20, b"\x5a" * 4096 * 10)

    with pytest.raises(UserError, match="damaged") as error:
        await load_all(path)
    assert "delete it" in error.value.hint


async def test_a_changed_byte_is_detected(path: Path) -> None:
    await filled(path)
    overwrite(path, find(path, b"\x41" * 200) + 100, b"?")

    with pytest.raises(UserError, match="an entry of step 1 is damaged"):
        await load_all(path)


async def test_the_hint_works(path: Path) -> None:
    await filled(path)
    remove(path)

    journal = await SqliteJournal.open(path)
    assert await journal.load() == []
    await journal.close()


@pytest.mark.parametrize("written", [FORMAT - 1, FORMAT + 1])
async def test_a_journal_of_another_format_is_refused_and_left_alone(path: Path, written: int) -> None:
    await filled(path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {written}")
    connection.close()

    with pytest.raises(UserError) as error:
        await SqliteJournal.open(path)

    assert f"format {written}" in error.value.what and f"format {FORMAT}" in error.value.what
    assert error.value.where == str(path)
    assert "version that wrote it" in error.value.hint and "new run directory" in error.value.hint
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (written,)
    connection.close()


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be opened"):
        await SqliteJournal.open(tmp_path / "nowhere" / "ledger.sqlite")


async def test_a_disk_that_does_not_answer_meets_a_deadline(path: Path) -> None:
    journal, answer = await SqliteJournal.open(path), threading.Event()
    stuck = asyncio.create_task(journal._thread.run(lambda: answer.wait(30.0)))
    await asyncio.sleep(0)
    journal._deadline_s = 0.1

    with pytest.raises(DeadlineError, match=r"waited 0.1 s for the ledger to reach the disk; look at .*ledger.sqlite"):
        await journal.append([(1, b"a")])

    answer.set()
    assert await stuck
    journal._deadline_s = 30.0
    assert await journal.load() == [(1, b"a")]  # it was late, not lost
    await journal.close()


async def test_pruning_gives_space_back(path: Path) -> None:
    journal = await SqliteJournal.open(path)
    await journal.append([(1, b"x" * 4_000_000)])
    await journal.prune(0)
    before = size(path)

    await journal.prune(1)

    assert size(path) < before / 10
    await journal.close()


async def test_the_journal_needs_no_shared_memory(tmp_path: Path) -> None:
    """Disks over a network have none; here a folder is in the place of its file."""
    (tmp_path / "ledger.sqlite-shm").mkdir()
    journal = await SqliteJournal.open(tmp_path / "ledger.sqlite")
    await journal.append([(1, b"a")])
    await journal.close()
    journal = await SqliteJournal.open(tmp_path / "ledger.sqlite")
    assert await journal.load() == [(1, b"a")]
    await journal.close()
