"""A journal whose process is killed with SIGKILL contains all acknowledged entries, in order, and few others."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rotation import daily
from tidemill.jobs.journal import SqliteJournal

WRITER = """
import asyncio, sys
from pathlib import Path
from tidemill.jobs.journal import SqliteJournal

async def main():
    journal = await SqliteJournal.open(Path(sys.argv[1]))
    number = len(await journal.load())

    async def write(number):
        await journal.append([(1, number.to_bytes(4, "little") * 500)])
        print(number, flush=True)

    while True:
        await asyncio.gather(*(write(number + at) for at in range(5)))
        number += 5
asyncio.run(main())
"""


@pytest.mark.parametrize("seed", daily(range(3), 1))
async def test_acknowledged_entries_survive_kill_9(tmp_path: Path, seed: int) -> None:
    path, rng, entries = tmp_path / "ledger.sqlite", random.Random(seed), 0
    for _ in range(3):  # several processes, one after another, with the same file
        acknowledged = write_and_kill(path, rng.uniform(0.05, 0.3))
        journal = await SqliteJournal.open(path)
        found = [int.from_bytes(blob[:4], "little") for _, blob in await journal.load()]
        await journal.close()

        assert found == list(range(len(found)))
        assert len(found) > max(acknowledged)
        assert len(found) <= max(acknowledged) + 1 + 10  # at most the entries in flight
        assert len(found) > entries
        entries = len(found)


def write_and_kill(path: Path, seconds: float) -> list[int]:
    """Entries acknowledged by a writer that was killed `seconds` after its first acknowledgement."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(seconds)
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()
        writer.wait(10)
    lines = (first + rest).splitlines(keepends=True)
    return [int(line) for line in lines if line.endswith("\n")]
