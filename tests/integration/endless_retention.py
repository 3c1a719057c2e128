"""Writes copies of a model folder as checkpoints, keeping one, until killed. Imports no torch."""

from __future__ import annotations

import shutil
import sys
from itertools import count
from pathlib import Path

from tidemill.trainer.checkpoint_store import CheckpointStore


def main() -> None:
    model, root = map(Path, sys.argv[1:])
    store = CheckpointStore(root, keep_last=1)

    def copy(folder: Path) -> None:
        shutil.copytree(model, folder, dirs_exist_ok=True)

    for step in count(1):
        store.write(step, copy)
        sys.stdout.write(f"step {step}\n")
        sys.stdout.flush()


main()
