"""A Ray cluster on this machine that ends with the process that asked for it, however that process ends.

Run as a program with one line of JSON (`Keep`) on standard input; it answers with one line (`Kept`) and stays until its
input closes or its parent is gone. Ray's servers die with whoever started them, but their helpers and busy actors stay
for a minute or more. This process adopts what is orphaned below it and ends it all within a fraction of a second.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from tidemill.core.records import Record

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 1.0
"""How often the parent is looked for; a closed input is seen at once."""


class LocalNode(Record):
    """One Ray node to start."""

    name: str
    cpus: float
    gpus: float
    labels: dict[str, str]
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES of what runs on it


class Keep(Record):
    """What to start; the first node is the head."""

    nodes: tuple[LocalNode, ...]
    object_store_bytes: int  # of each node


class Kept(Record):
    """Where it is, or why it is not."""

    address: str = ""
    error: str = ""
    folder: str = ""  # with all its files: for whoever outlives the keeper to remove


def main() -> int:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keep = msgspec.json.decode(sys.stdin.buffer.readline(), type=Keep)
    folder = tempfile.mkdtemp(prefix="tidemill-ray-")
    watching = threading.Thread(target=_end_with, args=(parent, folder), daemon=True)
    watching.start()  # before anything else: whoever asked may be gone before the cluster is up
    try:
        from tidemill.runtime.cluster.start import start  # importing Ray takes seconds in which the parent may go

        # Ray lets everybody into its own folder and those below it; nobody else comes through this one.
        kept = start(keep, temp_dir=f"{folder}/ray", folder=folder)
        sys.stdout.buffer.write(msgspec.json.encode(kept) + b"\n")
        sys.stdout.buffer.flush()
        if not kept.error:
            watching.join()
    finally:
        _end_all()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end_with(parent: int, folder: str) -> None:
    """End it all once the input closes or the parent is gone, whatever the main thread is doing."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if readable:
            break
    _end_all()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _end_all() -> None:
    """Kill every process below this one. The children of the dead become its own, until there are none."""
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):  # the main thread, in the middle of a start, may have waited for it
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended; its children are another's now
            found += map(int, (task / "children").read_text().split())
    return found


if __name__ == "__main__":
    sys.exit(main())
