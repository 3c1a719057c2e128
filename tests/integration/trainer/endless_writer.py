"""Writes checkpoints until it is killed; appends the number of a step to a file once it is durable."""

from __future__ import annotations

import random
import sys
from itertools import count
from pathlib import Path

from tidemill.trainer.checkpoint_store import CheckpointStore


def fill(folder: Path) -> None:
    for number in range(20):
        (folder / f"part-{number}").write_bytes(random.randbytes(20_000))
    (folder / "inner").mkdir()
    (folder / "inner" / "last").write_bytes(b"end")


def main() -> None:
    store = CheckpointStore(Path(sys.argv[1]), keep_last=1)
    told = Path(sys.argv[2]).open("a")  # noqa: SIM115 (until the process is killed)
    store.recover()
    latest = store.latest().checkpoint
    first = latest.step if latest else 1  # repeat the last step, so that replacing is also interrupted
    for step in count(first):
        store.write(step, fill, score=(step * 7) % 5 / 5)
        told.write(f"{step}\n")
        told.flush()
