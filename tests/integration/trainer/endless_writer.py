"""Writes checkpoints until it is killed; prints `step N` once N is durable. Imports no torch."""

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
    store.recover()
    latest = store.latest().checkpoint
    first = latest.step if latest else 1  # repeat the last step, so that replacing is also interrupted
    for step in count(first):
        store.write(step, fill, score=(step * 7) % 5 / 5)
        sys.stdout.write(f"step {step}\n")
        sys.stdout.flush()


main()
